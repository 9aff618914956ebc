# SPDX-License-Identifier: Apache-2.0
"""Pages are created so that CUDA IPC and GPUDirect RDMA can use them, where the device can, if that is asked for.

Compiles kvcached's own header against stand-ins for CUDA's, which declare what it uses: the properties that it asks
for are seen without a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

CUDA = """
#pragma once
#include <cstddef>
#define STATUS inline CUresult
#define CUDA_VERSION 13000
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_NOT_PERMITTED = 800 };
enum cudaError_t { cudaSuccess = 0 };
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
enum CUdevice_attribute {
  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED = 102,
  CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
};
enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1, CU_MEM_LOCATION_TYPE_DEVICE = 1, CU_MEM_HANDLE_TYPE_NONE = 0,
       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1, CU_MEM_HANDLE_TYPE_FABRIC = 8,
       CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3, CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0 };
struct CUmemLocation { int type; int id; };
struct CUmemAllocationProp {
  int type; int requestedHandleTypes; CUmemLocation location; void *win32HandleMetaData;
  struct { unsigned char compressionType; unsigned char gpuDirectRDMACapable; unsigned short usage; } allocFlags;
};
struct CUmemAccessDesc { CUmemLocation location; int flags; };
// Of device n the bits of n say what it has: file descriptors, GPUDirect RDMA, fabric handles.
STATUS cuDeviceGetAttribute(int *value, CUdevice_attribute, CUdevice device) {
  *value = (device & 2) != 0;
  return CUDA_SUCCESS;
}
STATUS cuGetErrorString(CUresult, const char **) { return CUDA_SUCCESS; }
STATUS cuMemGetAllocationGranularity(size_t *, const CUmemAllocationProp *, int) { return CUDA_SUCCESS; }
STATUS cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *prop, unsigned long long) {
  const int asked = prop->requestedHandleTypes == 8 ? 4 : prop->requestedHandleTypes;
  return (asked & ~prop->location.id) ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS;
}
STATUS cuMemRelease(CUmemGenericAllocationHandle) { return CUDA_SUCCESS; }
STATUS cuMemAddressReserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long) { return CUDA_SUCCESS; }
STATUS cuMemAddressFree(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
STATUS cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) { return CUDA_SUCCESS; }
STATUS cuMemUnmap(CUdeviceptr, size_t) { return CUDA_SUCCESS; }
STATUS cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) { return CUDA_SUCCESS; }
inline const char *cudaGetErrorString(cudaError_t) { return ""; }
inline cudaError_t cudaFree(void *) { return cudaSuccess; }
inline cudaError_t cudaFree(int) { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int *) { return cudaSuccess; }
inline cudaError_t cudaMemGetInfo(size_t *, size_t *) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
"""
MAIN = """
#include "gpu_vmm.hpp"
#include <cstdio>
int main() {
  for (int device : {0, 1, 2, 4, 7}) {
    auto prop = kvcached::gpu_vmm::make_pinned_device_allocation_prop(device);
    std::printf("%d%d ", int(prop.requestedHandleTypes), int(prop.allocFlags.gpuDirectRDMACapable));
  }
}
"""
NONE, ASKED = "00 00 00 00 00", "00 10 01 80 81"
"""Handle type (0 none, 1 file descriptor, 8 fabric) and GPUDirect RDMA, of devices with more and more of them."""

folder = Path(sys.argv[1])
for name, text in {"cuda.h": CUDA, "cuda_runtime.h": '#include "cuda.h"\n', "main.cpp": MAIN}.items():
    (folder / name).write_text(text)
compiler = os.environ.get("CXX", "c++")
command = [
    compiler,
    "-std=c++17",
    "-DKVCACHED_USE_CUDA",
    f"-I{folder}",
    f"-I{folder}/csrc/inc",
    "main.cpp",
    "-o",
    "main",
]
subprocess.run(command, cwd=folder, check=True)
default, asked = (
    subprocess.run(
        [str(folder / "main")], capture_output=True, text=True, check=True, env={"KVCACHED_SHAREABLE_PAGES": wanted}
    ).stdout.strip()
    for wanted in ("", "true")
)
print(f"by default {default}, asked for {asked}; expected {NONE} and {ASKED}")
sys.exit((default, asked) != (NONE, ASKED))
