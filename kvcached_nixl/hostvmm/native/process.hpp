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

// Physical memory is a stretch of one sparse file per process: one descriptor, however many pages. Offsets are never used
// twice; releasing punches a hole, which returns the memory to the system.
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

// Everything this process holds. Never destroyed: kvcached releases its pages from static destructors, whose order against
// ours is not defined. A forked child starts with a new one.
struct Process {
  std::mutex mutex; // held by every entry point that touches anything below
  std::array<Device, kMaxDevices> devices;
  std::map<uintptr_t, size_t> reservations; // address to bytes
  std::map<uintptr_t, Mapping> mappings;
  std::unordered_set<Allocation *> allocations;
  std::pair<void *, size_t> spare{}; // mappings for nothing but to be given up when there is no other
  int file = -1;
  off_t file_end_bytes = 0;
};

Process &process();

hipError_t check_device(int device);

// Frees what was released and is no longer mapped. The caller holds the lock.
hipError_t free_if_unused(Allocation *allocation);

inline bool is_aligned(uintptr_t value) { return value % kGranularityBytes == 0; }

} // namespace hostvmm
