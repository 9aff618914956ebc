// SPDX-License-Identifier: Apache-2.0
#include "error.hpp"
#include "process.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <sys/mman.h>
#include <unistd.h>

using hostvmm::Allocation;
using hostvmm::check_device;
using hostvmm::fail;
using hostvmm::free_if_unused;
using hostvmm::is_aligned;
using hostvmm::kGranularityBytes;
using hostvmm::mebibytes;
using hostvmm::Process;
using hostvmm::process;

namespace {

hipError_t ensure_file() {
  Process &state = process();
  if (state.file >= 0) {
    return hipSuccess;
  }
  state.file = memfd_create("kvcached-hostvmm", MFD_CLOEXEC);
  if (state.file < 0) {
    return fail(hipErrorOperatingSystem, std::string("memfd_create failed: ") + std::strerror(errno));
  }
  return hipSuccess;
}

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 // Linux 6.1
#endif

// A device's memory costs no page fault for each 4 KiB, so neither should this. Explicit collapsing works whatever
// shmem_enabled says, which is "never" by default. Needs one page in each huge page. It is an attempt: where the kernel
// has no huge page, the range gets ordinary pages.
void try_huge_pages(off_t offset_bytes, size_t size_bytes) {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t end = kGranularityBytes; end <= size_bytes; end += kGranularityBytes) {
    if (fallocate(process().file, 0, offset_bytes + static_cast<off_t>(end - page_bytes), static_cast<off_t>(page_bytes)) != 0) {
      return;
    }
  }
  void *reserved =
      mmap(nullptr, size_bytes + kGranularityBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return;
  }
  const uintptr_t aligned = (reinterpret_cast<uintptr_t>(reserved) + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
  void *mapped = mmap(reinterpret_cast<void *>(aligned), size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, process().file,
                      offset_bytes);
  if (mapped != MAP_FAILED) {
    madvise(mapped, size_bytes, MADV_COLLAPSE);
  }
  munmap(reserved, size_bytes + kGranularityBytes);
}

hipError_t unback(off_t offset_bytes, size_t size_bytes) {
  int error = 0;
  do {
    error = fallocate(process().file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset_bytes, static_cast<off_t>(size_bytes)) == 0
                ? 0
                : errno;
  } while (error == EINTR);
  if (error == 0) {
    return hipSuccess;
  }
  return fail(hipErrorOperatingSystem, std::string("returning host memory failed: ") + std::strerror(error));
}

// Allocates the whole range now, so that a lack of host memory is an error here and not a SIGBUS at the first write.
hipError_t back(off_t offset_bytes, size_t size_bytes) {
  try_huge_pages(offset_bytes, size_bytes);
  int error = 0;
  do {
    error = fallocate(process().file, 0, offset_bytes, static_cast<off_t>(size_bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == 0) {
    return hipSuccess;
  }
  unback(offset_bytes, size_bytes); // what the huge pages took already
  if (error == ENOMEM || error == ENOSPC) {
    return fail(hipErrorOutOfMemory, "out of memory: the host cannot provide " + mebibytes(static_cast<long long>(size_bytes)) +
                                         " more; lower KVCACHED_HOSTVMM_GIB or free memory on the machine");
  }
  return fail(hipErrorOperatingSystem, std::string("allocating host memory failed: ") + std::strerror(error));
}

} // namespace

hipError_t hostvmm::free_if_unused(Allocation *allocation) {
  if (!allocation->released || allocation->mappings != 0) {
    return hipSuccess;
  }
  const hipError_t status = unback(allocation->offset_bytes, allocation->size_bytes);
  if (status != hipSuccess) {
    return status;
  }
  process().devices[static_cast<size_t>(allocation->device)].give_back(static_cast<int64_t>(allocation->size_bytes));
  process().allocations.erase(allocation);
  delete allocation;
  return hipSuccess;
}

extern "C" {

hipError_t hipMemGetAllocationGranularity(size_t *granularity, const hipMemAllocationProp * /*prop*/,
                                          hipMemAllocationGranularity_flags /*option*/) {
  *granularity = kGranularityBytes;
  return hipSuccess;
}

hipError_t hipMemCreate(hipMemGenericAllocationHandle_t *handle, size_t size, const hipMemAllocationProp *prop,
                        unsigned long long flags) {
  if (handle == nullptr || prop == nullptr || size == 0 || !is_aligned(size) || flags != 0 ||
      prop->type != hipMemAllocationTypePinned || prop->location.type != hipMemLocationTypeDevice) {
    return fail(hipErrorInvalidValue, "memory is created in multiples of " + mebibytes(kGranularityBytes) + ", pinned, on a device; asked for " +
                                          std::to_string(size) + " bytes");
  }
  const int index = prop->location.id;
  if (const hipError_t status = check_device(index); status != hipSuccess) {
    return status;
  }
  std::lock_guard<std::mutex> lock(process().mutex);
  Process &state = process();
  auto &device = state.devices[static_cast<size_t>(index)];
  hipError_t status = device.attach(index);
  status = status == hipSuccess ? ensure_file() : status;
  status = status == hipSuccess ? device.claim(static_cast<int64_t>(size)) : status;
  if (status != hipSuccess) {
    return status;
  }
  auto allocation = std::make_unique<Allocation>(Allocation{index, size, state.file_end_bytes, 0, false});
  status = back(allocation->offset_bytes, size);
  if (status != hipSuccess) {
    device.give_back(static_cast<int64_t>(size));
    return status;
  }
  state.file_end_bytes += static_cast<off_t>(size);
  state.allocations.insert(allocation.get());
  *handle = reinterpret_cast<hipMemGenericAllocationHandle_t>(allocation.release());
  return hipSuccess;
}

hipError_t hipMemRelease(hipMemGenericAllocationHandle_t handle) {
  std::lock_guard<std::mutex> lock(process().mutex);
  auto *allocation = reinterpret_cast<Allocation *>(handle);
  if (process().allocations.count(allocation) == 0 || allocation->released) {
    return fail(hipErrorInvalidHandle, "the released handle does not belong to this process, or was released before");
  }
  allocation->released = true;
  const hipError_t status = free_if_unused(allocation);
  if (status != hipSuccess) {
    allocation->released = false; // the caller still owns it and may release it again
  }
  return status;
}

} // extern "C"
