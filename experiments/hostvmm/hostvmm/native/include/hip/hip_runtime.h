/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the HIP runtime that kvcached calls, answered from host memory.
 *
 * Names, argument orders and enumerators are HIP's public interface. Error values are HIP's as well, because kvcached
 * prints them. Everything is linked into kvcached's extension from a static archive, so no library is looked up at run time.
 */
#ifndef KVCACHED_NIXL_HOSTVMM_HIP_RUNTIME_H
#define KVCACHED_NIXL_HOSTVMM_HIP_RUNTIME_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum hipError_t {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorNotInitialized = 3,
  hipErrorInvalidDevice = 101,
  hipErrorOperatingSystem = 304,
  hipErrorInvalidHandle = 400,
} hipError_t;

typedef enum hipDeviceAttribute_t {
  hipDeviceAttributeVirtualMemoryManagementSupported = 1,
} hipDeviceAttribute_t;

typedef enum hipMemAllocationType {
  hipMemAllocationTypeInvalid = 0,
  hipMemAllocationTypePinned = 1,
} hipMemAllocationType;

typedef enum hipMemAllocationHandleType {
  hipMemHandleTypeNone = 0,
} hipMemAllocationHandleType;

typedef enum hipMemLocationType {
  hipMemLocationTypeInvalid = 0,
  hipMemLocationTypeDevice = 1,
} hipMemLocationType;

typedef enum hipMemAccessFlags {
  hipMemAccessFlagsProtNone = 0,
  hipMemAccessFlagsProtRead = 1,
  hipMemAccessFlagsProtReadWrite = 3,
} hipMemAccessFlags;

typedef enum hipMemAllocationGranularity_flags {
  hipMemAllocationGranularityMinimum = 0,
  hipMemAllocationGranularityRecommended = 1,
} hipMemAllocationGranularity_flags;

typedef struct hipMemLocation {
  hipMemLocationType type;
  int id;
} hipMemLocation;

typedef struct hipMemAllocationProp {
  hipMemAllocationType type;
  hipMemAllocationHandleType requestedHandleType;
  hipMemLocation location;
} hipMemAllocationProp;

typedef struct hipMemAccessDesc {
  hipMemLocation location;
  hipMemAccessFlags flags;
} hipMemAccessDesc;

typedef struct ihipMemGenericAllocationHandle *hipMemGenericAllocationHandle_t;

hipError_t hipInit(unsigned int flags);
hipError_t hipSetDevice(int device);
hipError_t hipGetDevice(int *device);
hipError_t hipMemGetInfo(size_t *free_bytes, size_t *total_bytes);
hipError_t hipDeviceSynchronize(void);
hipError_t hipDeviceGetAttribute(int *value, hipDeviceAttribute_t attribute, int device);
hipError_t hipMemGetAllocationGranularity(size_t *granularity, const hipMemAllocationProp *prop,
                                          hipMemAllocationGranularity_flags option);
hipError_t hipMemCreate(hipMemGenericAllocationHandle_t *handle, size_t size, const hipMemAllocationProp *prop,
                        unsigned long long flags);
hipError_t hipMemRelease(hipMemGenericAllocationHandle_t handle);
hipError_t hipMemAddressReserve(void **ptr, size_t size, size_t alignment, void *address, unsigned long long flags);
hipError_t hipMemAddressFree(void *ptr, size_t size);
hipError_t hipMemMap(void *ptr, size_t size, size_t offset, hipMemGenericAllocationHandle_t handle,
                     unsigned long long flags);
hipError_t hipMemUnmap(void *ptr, size_t size);
hipError_t hipMemSetAccess(void *ptr, size_t size, const hipMemAccessDesc *descriptions, size_t count);
/* Valid until the calling thread's next failing call. Carries that failure's explanation when `error` is its code. */
const char *hipGetErrorString(hipError_t error);

#ifdef __cplusplus
}
#endif

/*
 * kvcached wraps its addresses as tensors of the device it was told (cuda). They are host addresses: the tensor must say cpu,
 * or the first operation on it would be sent to a device that is not there.
 */
#if defined(__cplusplus) && defined(TORCH_TARGET_VERSION)
#include <torch/csrc/stable/ops.h>

namespace torch::stable {
inline Tensor kvcached_nixl_from_host_blob(void *data, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                           torch::headeronly::IntHeaderOnlyArrayRef strides, Device /*requested*/,
                                           torch::headeronly::ScalarType dtype) {
  return from_blob(data, sizes, strides, Device(torch::headeronly::DeviceType::CPU), dtype);
}
} // namespace torch::stable
#define from_blob kvcached_nixl_from_host_blob
#endif

#endif /* KVCACHED_NIXL_HOSTVMM_HIP_RUNTIME_H */
