// SPDX-License-Identifier: Apache-2.0
#include "error.hpp"

#include <cstdio>

namespace hostvmm {
namespace {

struct LastFailure {
  hipError_t code = hipSuccess;
  std::string explanation;
};

LastFailure &last_failure() {
  static thread_local LastFailure failure;
  return failure;
}

} // namespace

hipError_t fail(hipError_t code, const std::string &explanation) {
  last_failure() = {code, explanation};
  return code;
}

std::string mebibytes(long long bytes) {
  char text[48];
  std::snprintf(text, sizeof(text), "%.1f MiB", static_cast<double>(bytes) / (1024.0 * 1024.0));
  return text;
}

} // namespace hostvmm

extern "C" const char *hipGetErrorString(hipError_t error) {
  const auto &failure = hostvmm::last_failure();
  if (error != hipSuccess && failure.code == error) {
    return failure.explanation.c_str();
  }
  switch (error) {
  case hipSuccess:
    return "no error";
  case hipErrorInvalidValue:
    return "invalid argument";
  case hipErrorOutOfMemory:
    return "out of memory";
  case hipErrorNotInitialized:
    return "initialization error";
  case hipErrorInvalidDevice:
    return "invalid device ordinal";
  case hipErrorOperatingSystem:
    return "operating system call failed";
  case hipErrorInvalidHandle:
    return "invalid resource handle";
  }
  return "unrecognized error code";
}
