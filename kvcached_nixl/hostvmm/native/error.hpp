// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <hip/hip_runtime.h>

#include <string>

namespace hostvmm {

// Records why the calling thread's call failed and returns `code`. kvcached fetches the text with hipGetErrorString right
// after the failing call, on the same thread, and puts it into the exception the engine reports.
hipError_t fail(hipError_t code, const std::string &explanation);

std::string mebibytes(long long bytes);

} // namespace hostvmm
