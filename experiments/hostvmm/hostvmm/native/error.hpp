// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <hip/hip_runtime.h>

#include <string>

namespace hostvmm {

// Stores the error text of the calling thread and returns `code`. kvcached reads the text with hipGetErrorString right
// after the failed call, on the same thread, and puts it into the exception that the engine reports.
hipError_t fail(hipError_t code, const std::string &explanation);

std::string mebibytes(long long bytes);

} // namespace hostvmm
