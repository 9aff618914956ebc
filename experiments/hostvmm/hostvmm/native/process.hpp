// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "device.hpp"

#include <array>
#include <map>
#include <mutex>
#include <sys/types.h>
#include <unordered_set>
#include <utility>

namespace hostvmm {

// Physical memory: a range of one sparse file per process, so that any number of pages needs one file descriptor. Offsets
// are never reused. Releasing punches a hole, which returns the memory to the system.
struct Allocation {
  int device;
  size_t size_bytes;
  off_t offset_bytes;
  size_t mappings;
  bool released; // released while mapped: freed with its last mapping, as on a GPU
};

struct Mapping {
  size_t size_bytes;
  Allocation *allocation;
};

// All state of this process. Never destroyed, because kvcached releases its pages in static destructors, which may run
// after ours. A forked child starts with a new one.
struct Process {
  std::mutex mutex; // every entry point must hold it to use any member below
  std::array<Device, kMaxDevices> devices;
  std::map<uintptr_t, size_t> reservations; // address to bytes
  std::map<uintptr_t, Mapping> mappings;
  std::unordered_set<Allocation *> allocations;
  std::pair<void *, size_t> spare{}; // unused mappings, freed when the kernel allows no other
  int file = -1;
  off_t file_end_bytes = 0;
};

Process &process();

hipError_t check_device(int device);

// Frees an allocation that was released and is no longer mapped. The caller must hold the lock.
hipError_t free_if_unused(Allocation *allocation);

inline bool is_aligned(uintptr_t value) { return value % kGranularityBytes == 0; }

} // namespace hostvmm
