// SPDX-License-Identifier: Apache-2.0
#include "error.hpp"
#include "process.hpp"

using hostvmm::check_device;
using hostvmm::fail;
using hostvmm::process;

namespace {

thread_local int current_device = 0;

} // namespace

namespace hostvmm {

hipError_t check_device(int device) {
  if (device < 0 || device >= kMaxDevices) {
    return fail(hipErrorInvalidDevice, "device " + std::to_string(device) + " does not exist; the emulation has devices 0 to " +
                                           std::to_string(kMaxDevices - 1));
  }
  return hipSuccess;
}

} // namespace hostvmm

extern "C" {

hipError_t hipInit(unsigned int /*flags*/) {
  std::lock_guard<std::mutex> lock(process().mutex);
  return process().devices[0].attach(0);
}

hipError_t hipSetDevice(int device) {
  if (const hipError_t status = check_device(device); status != hipSuccess) {
    return status;
  }
  std::lock_guard<std::mutex> lock(process().mutex);
  if (const hipError_t status = process().devices[static_cast<size_t>(device)].attach(device); status != hipSuccess) {
    return status;
  }
  current_device = device;
  return hipSuccess;
}

hipError_t hipGetDevice(int *device) {
  *device = current_device;
  return hipSuccess;
}

hipError_t hipMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  std::lock_guard<std::mutex> lock(process().mutex);
  auto &device = process().devices[static_cast<size_t>(current_device)];
  if (const hipError_t status = device.attach(current_device); status != hipSuccess) {
    return status;
  }
  return device.info(free_bytes, total_bytes);
}

hipError_t hipDeviceSynchronize(void) { return hipSuccess; }

hipError_t hipDeviceGetAttribute(int *value, hipDeviceAttribute_t attribute, int device) {
  if (const hipError_t status = check_device(device); status != hipSuccess) {
    return status;
  }
  if (attribute != hipDeviceAttributeVirtualMemoryManagementSupported) {
    return fail(hipErrorInvalidValue, "device attribute " + std::to_string(attribute) + " is not emulated");
  }
  *value = 1;
  return hipSuccess;
}

} // extern "C"
