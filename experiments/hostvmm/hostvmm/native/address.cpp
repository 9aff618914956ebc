// SPDX-License-Identifier: Apache-2.0
#include "error.hpp"
#include "process.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

using hostvmm::Allocation;
using hostvmm::fail;
using hostvmm::free_if_unused;
using hostvmm::is_aligned;
using hostvmm::kGranularityBytes;
using hostvmm::Mapping;
using hostvmm::mebibytes;
using hostvmm::Process;
using hostvmm::process;

namespace {

long kernel_mapping_limit() {
  long limit = -1;
  if (FILE *file = std::fopen("/proc/sys/vm/max_map_count", "re")) {
    if (std::fscanf(file, "%ld", &limit) != 1) {
      limit = -1;
    }
    std::fclose(file);
  }
  return limit;
}

long kernel_mappings_in_use() {
  long lines = 0;
  if (FILE *file = std::fopen("/proc/self/maps", "re")) {
    for (int letter = std::fgetc(file); letter != EOF; letter = std::fgetc(file)) {
      lines += letter == '\n' ? 1 : 0;
    }
    std::fclose(file);
  }
  return lines;
}

constexpr long kSpareMappings = 128;

// Adjacent pages get different protections; otherwise the kernel would merge them into one mapping.
void hold_spare_mappings() {
  const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void *spare = mmap(nullptr, kSpareMappings * page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (spare == MAP_FAILED) {
    return;
  }
  for (long page = 0; page < kSpareMappings; page += 2) {
    mprotect(static_cast<char *>(spare) + page * page_bytes, page_bytes, PROT_READ);
  }
  process().spare = {spare, kSpareMappings * page_bytes};
}

// Without a free mapping the process could not report the error: its text and Python's exception need some to allocate.
void give_up_spare_mappings() {
  auto &[spare, size_bytes] = process().spare;
  if (spare != nullptr) {
    munmap(spare, size_bytes);
    spare = nullptr;
  }
}

// Each page of a reserved range is one kernel mapping, and the kernel limits their number per process.
hipError_t fail_to_map(const char *what, size_t page_bytes, int error) {
  if (error != ENOMEM) {
    return fail(hipErrorOperatingSystem, std::string(what) + " failed: " + std::strerror(error));
  }
  give_up_spare_mappings();
  const long limit = kernel_mapping_limit();
  const long in_use = kernel_mappings_in_use();
  if (limit < 0 || in_use + 2 * kSpareMappings < limit) {
    return fail(hipErrorOperatingSystem, std::string(what) + " failed: " + std::strerror(error) + " (" + std::to_string(in_use) +
                                             " memory mappings in use, vm.max_map_count is " + std::to_string(limit) +
                                             "; check the address-space limit `ulimit -v`)");
  }
  size_t reserved_bytes = 0;
  for (const auto &[address, size_bytes] : process().reservations) {
    reserved_bytes += size_bytes;
  }
  const long needed = in_use - static_cast<long>(process().mappings.size()) + static_cast<long>(reserved_bytes / page_bytes);
  return fail(hipErrorOperatingSystem,
              std::string(what) + " failed: all " + std::to_string(limit) +
                  " memory mappings the kernel allows a process are in use (vm.max_map_count), and this pool of " +
                  mebibytes(static_cast<long long>(reserved_bytes)) + " in pages of " + mebibytes(static_cast<long long>(page_bytes)) +
                  " needs about " + std::to_string(needed) + "; lower KVCACHED_HOSTVMM_GIB, set KVCACHED_CONTIGUOUS_LAYOUT=true " +
                  "(larger pages), or raise the limit: sysctl -w vm.max_map_count=" + std::to_string(needed + needed / 4));
}

// Returns the mappings that cover [begin, begin + size) exactly, as a pair of iterators; first == second if none do.
auto tiles(uintptr_t begin, size_t size_bytes) {
  auto &mappings = process().mappings;
  auto first = mappings.find(begin);
  auto last = first;
  uintptr_t reached = begin;
  while (last != mappings.end() && last->first == reached && reached < begin + size_bytes) {
    reached += last->second.size_bytes;
    ++last;
  }
  return reached == begin + size_bytes ? std::pair(first, last) : std::pair(mappings.end(), mappings.end());
}

bool is_reserved(uintptr_t begin, size_t size_bytes) {
  auto next = process().reservations.upper_bound(begin);
  if (next == process().reservations.begin()) {
    return false;
  }
  const auto &[address, reserved_bytes] = *std::prev(next);
  return begin - address <= reserved_bytes && size_bytes <= reserved_bytes - (begin - address);
}

bool is_vacant(uintptr_t begin, size_t size_bytes) {
  auto next = process().mappings.lower_bound(begin);
  if (next != process().mappings.end() && next->first < begin + size_bytes) {
    return false;
  }
  return next == process().mappings.begin() || std::prev(next)->first + std::prev(next)->second.size_bytes <= begin;
}

} // namespace

extern "C" {

hipError_t hipMemAddressReserve(void **ptr, size_t size, size_t alignment, void *address, unsigned long long flags) {
  alignment = alignment < kGranularityBytes ? kGranularityBytes : alignment;
  if (ptr == nullptr || size == 0 || !is_aligned(size) || (alignment & (alignment - 1)) != 0 || flags != 0) {
    return fail(hipErrorInvalidValue, "addresses are reserved in multiples of " + mebibytes(kGranularityBytes) + "; asked for " +
                                          std::to_string(size) + " bytes");
  }
  std::lock_guard<std::mutex> lock(process().mutex);
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *found = mmap(address, size, PROT_NONE, kFlags, -1, 0);
  if (found != MAP_FAILED && reinterpret_cast<uintptr_t>(found) % alignment != 0) {
    munmap(found, size);
    found = mmap(nullptr, size + alignment, PROT_NONE, kFlags, -1, 0);
    if (found != MAP_FAILED) {
      const auto begin = reinterpret_cast<uintptr_t>(found);
      const uintptr_t aligned = (begin + alignment - 1) / alignment * alignment;
      if (aligned != begin) {
        munmap(found, aligned - begin);
      }
      if (aligned != begin + alignment) {
        munmap(reinterpret_cast<void *>(aligned + size), begin + alignment - aligned);
      }
      found = reinterpret_cast<void *>(aligned);
    }
  }
  if (found == MAP_FAILED) {
    return fail(hipErrorOutOfMemory, "reserving " + mebibytes(static_cast<long long>(size)) + " of addresses failed: " +
                                         std::strerror(errno) + "; check the address-space limit `ulimit -v`");
  }
  if (process().reservations.empty()) {
    hold_spare_mappings();
  }
  process().reservations.emplace(reinterpret_cast<uintptr_t>(found), size);
  *ptr = found;
  return hipSuccess;
}

hipError_t hipMemAddressFree(void *ptr, size_t size) {
  std::lock_guard<std::mutex> lock(process().mutex);
  const auto begin = reinterpret_cast<uintptr_t>(ptr);
  const auto reservation = process().reservations.find(begin);
  if (reservation == process().reservations.end() || reservation->second != size) {
    return fail(hipErrorInvalidValue, "the freed range is not a reserved range");
  }
  if (!is_vacant(begin, size)) {
    return fail(hipErrorInvalidValue, "the freed range still holds mappings");
  }
  if (munmap(ptr, size) != 0) {
    return fail_to_map("freeing reserved addresses", size, errno);
  }
  process().reservations.erase(reservation);
  return hipSuccess;
}

hipError_t hipMemMap(void *ptr, size_t size, size_t offset, hipMemGenericAllocationHandle_t handle, unsigned long long flags) {
  std::lock_guard<std::mutex> lock(process().mutex);
  Process &state = process();
  const auto begin = reinterpret_cast<uintptr_t>(ptr);
  auto *allocation = reinterpret_cast<Allocation *>(handle);
  if (state.allocations.count(allocation) == 0 || allocation->released) {
    return fail(hipErrorInvalidHandle, "the mapped handle does not belong to this process, or was released");
  }
  if (size == 0 || flags != 0 || !is_aligned(begin) || !is_aligned(size) || !is_aligned(offset) ||
      offset > allocation->size_bytes || size > allocation->size_bytes - offset) {
    return fail(hipErrorInvalidValue, "the mapped range exceeds the memory, or is not aligned to its granularity");
  }
  if (!is_reserved(begin, size) || !is_vacant(begin, size)) {
    return fail(hipErrorInvalidValue, "the mapped addresses are not reserved, or are mapped already");
  }
  void *mapped = mmap(ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED, state.file, allocation->offset_bytes + static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) {
    return fail_to_map("mapping memory", size, errno);
  }
  if (madvise(ptr, size, MADV_DONTFORK) != 0) {
    const int error = errno;
    mmap(ptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return fail_to_map("keeping a mapping from forked children", size, error);
  }
  state.mappings.emplace(begin, Mapping{size, allocation});
  ++allocation->mappings;
  state.devices[static_cast<size_t>(allocation->device)].count_map(static_cast<int64_t>(size));
  return hipSuccess;
}

hipError_t hipMemUnmap(void *ptr, size_t size) {
  std::lock_guard<std::mutex> lock(process().mutex);
  Process &state = process();
  const auto [first, last] = tiles(reinterpret_cast<uintptr_t>(ptr), size);
  if (first == last) {
    return fail(hipErrorInvalidValue, "the unmapped range does not consist of whole mappings");
  }
  if (mmap(ptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return fail_to_map("unmapping memory", first->second.size_bytes, errno);
  }
  hipError_t status = hipSuccess;
  for (auto mapping = first; mapping != last; mapping = state.mappings.erase(mapping)) {
    Allocation *allocation = mapping->second.allocation;
    --allocation->mappings;
    state.devices[static_cast<size_t>(allocation->device)].count_unmap(static_cast<int64_t>(mapping->second.size_bytes));
    const hipError_t freed = free_if_unused(allocation);
    status = status == hipSuccess ? freed : status;
  }
  return status;
}

hipError_t hipMemSetAccess(void *ptr, size_t size, const hipMemAccessDesc *descriptions, size_t count) {
  std::lock_guard<std::mutex> lock(process().mutex);
  const auto [first, last] = tiles(reinterpret_cast<uintptr_t>(ptr), size);
  if (first == last || descriptions == nullptr || count != 1) {
    return fail(hipErrorInvalidValue, "access can only be set for whole mappings, and for one device at a time");
  }
  int protection = PROT_NONE;
  if (descriptions->flags == hipMemAccessFlagsProtRead) {
    protection = PROT_READ;
  } else if (descriptions->flags == hipMemAccessFlagsProtReadWrite) {
    protection = PROT_READ | PROT_WRITE;
  }
  if (mprotect(ptr, size, protection) != 0) {
    return fail_to_map("setting access", first->second.size_bytes, errno);
  }
  return hipSuccess;
}

} // extern "C"
