// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <hip/hip_runtime.h>

#include <cstddef>
#include <cstdint>

namespace hostvmm {

constexpr size_t kGranularityBytes = 2u << 20;
constexpr int kMaxDevices = 16;
constexpr int kMaxProcesses = 128;

// Layout of the shared file. hostvmm/device.py reads it, too. Change kVersion with any change of a field.
constexpr uint64_t kMagic = 0x314d4d5654534f48; // "HOSTVMM1", little endian
constexpr int64_t kVersion = 1;

struct Slot {
  int64_t pid;         // 0: free
  int64_t start_ticks; // /proc/PID/stat field 22: detects a reused pid
  int64_t created_bytes;
  int64_t mapped_bytes;
  int64_t creates;
  int64_t releases;
  int64_t maps;
  int64_t unmaps;
  int64_t refused_creates;
};

struct DeviceFile {
  uint64_t magic;
  int64_t version;
  int64_t capacity_bytes;
  int64_t reserved;
  Slot slots[kMaxProcesses];
};

// One emulated device. Its file is shared by all processes of this user that select the same device, so that they see the
// same amount of free memory, as on a GPU. Not thread-safe: the caller must hold the process lock.
class Device {
public:
  hipError_t attach(int index); // idempotent
  hipError_t claim(int64_t bytes);
  void give_back(int64_t bytes); // accounting only, cannot fail
  void count_map(int64_t bytes);
  void count_unmap(int64_t bytes);
  hipError_t info(size_t *free_bytes, size_t *total_bytes);
  void detach(); // frees the slot; the last live process removes the file
  void abandon_in_forked_child();

private:
  int64_t live_bytes_locked(); // reclaims slots of dead processes
  hipError_t open_locked(int64_t capacity_bytes);

  int fd_ = -1;
  DeviceFile *file_ = nullptr;
  Slot *slot_ = nullptr;
  char path_[192] = {};
};

} // namespace hostvmm
