// SPDX-License-Identifier: Apache-2.0
#include "device.hpp"

#include "error.hpp"

#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <locale>
#include <sstream>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace hostvmm {
namespace {

constexpr double kDefaultGib = 4.0;
constexpr const char *kSizeVariable = "KVCACHED_HOSTVMM_GIB";
constexpr const char *kNameVariable = "KVCACHED_HOSTVMM_DEVICE";

std::string system_error(const char *what, const std::string &object) {
  const int error = errno;
  return std::string(what) + " " + object + " failed: " + std::strerror(error);
}

// flock, not a mutex in the file: the kernel releases it when the process that holds it dies.
class FileLock {
public:
  explicit FileLock(int fd) : fd_(fd) {
    while (flock(fd_, LOCK_EX) != 0 && errno == EINTR) {
    }
  }
  ~FileLock() { flock(fd_, LOCK_UN); }
  FileLock(const FileLock &) = delete;
  FileLock &operator=(const FileLock &) = delete;

private:
  int fd_;
};

// Returns the start time in clock ticks since boot, or -1 for a dead process (a zombie counts as dead: it has no memory).
int64_t start_ticks(int64_t pid) {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%lld/stat", static_cast<long long>(pid));
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return -1;
  }
  char text[1024];
  const ssize_t length = read(fd, text, sizeof(text) - 1);
  close(fd);
  if (length <= 0) {
    return -1;
  }
  text[length] = '\0';
  const char *rest = std::strrchr(text, ')'); // the command name may contain spaces and parentheses
  char state = 0;
  long long ticks = -1;
  if (rest == nullptr || std::sscanf(rest + 1,
                                     " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %lld",
                                     &state, &ticks) != 2) {
    return -1;
  }
  return (state == 'Z' || state == 'X') ? -1 : ticks;
}

hipError_t capacity_from_environment(int64_t *capacity_bytes) {
  const char *text = std::getenv(kSizeVariable);
  double gib = kDefaultGib;
  if (text != nullptr && text[0] != '\0') {
    std::istringstream stream{std::string(text)};
    stream.imbue(std::locale::classic());
    if (!(stream >> gib) || !(stream >> std::ws).eof() || !std::isfinite(gib) || gib <= 0 || gib > 1 << 20) {
      return fail(hipErrorInvalidValue, std::string(kSizeVariable) + "='" + text +
                                            "' is not a device size; expected a positive number of GiB such as 4 or 0.5");
    }
  }
  *capacity_bytes = static_cast<int64_t>(gib * (1 << 30)) / static_cast<int64_t>(kGranularityBytes) *
                    static_cast<int64_t>(kGranularityBytes);
  if (*capacity_bytes == 0) {
    return fail(hipErrorInvalidValue,
                std::string(kSizeVariable) + "='" + text + "' is less than one page; expected at least 2 MiB (0.002 GiB)");
  }
  return hipSuccess;
}

} // namespace

hipError_t Device::attach(int index) {
  if (slot_ != nullptr) {
    return hipSuccess;
  }
  int64_t capacity_bytes = 0;
  const hipError_t status = capacity_from_environment(&capacity_bytes);
  if (status != hipSuccess) {
    return status;
  }
  std::string name = "0";
  if (const char *named = std::getenv(kNameVariable); named != nullptr && named[0] != '\0') {
    name = named;
  }
  for (const char letter : name) {
    if ((std::isalnum(static_cast<unsigned char>(letter)) == 0 && letter != '_' && letter != '-') || name.size() > 64) {
      return fail(hipErrorInvalidValue, std::string(kNameVariable) + "='" + name +
                                            "' is not a device name; expected up to 64 letters, digits, '_' or '-'");
    }
  }
  std::snprintf(path_, sizeof(path_), "/dev/shm/kvcached-hostvmm-%u-%s-%d", static_cast<unsigned>(getuid()), name.c_str(), index);
  for (;;) {
    fd_ = open(path_, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd_ < 0) {
      return fail(hipErrorOperatingSystem, system_error("opening the file of the emulated device", path_));
    }
    hipError_t opened = hipSuccess;
    struct stat state {};
    {
      FileLock lock(fd_);
      if (fstat(fd_, &state) != 0) {
        opened = fail(hipErrorOperatingSystem, system_error("reading the file of the emulated device", path_));
      } else if (state.st_nlink != 0) {
        opened = open_locked(capacity_bytes);
      }
    }
    if (opened == hipSuccess && state.st_nlink != 0) {
      return hipSuccess;
    }
    if (file_ != nullptr) {
      munmap(file_, sizeof(DeviceFile));
      file_ = nullptr;
    }
    close(fd_);
    fd_ = -1;
    if (opened != hipSuccess) {
      return opened;
    }
    // The last process removed the file between open and lock: open the new file.
  }
}

hipError_t Device::open_locked(int64_t capacity_bytes) {
  // Allocates the space, too: with a full file system, writing to an unallocated file below would raise SIGBUS.
  errno = posix_fallocate(fd_, 0, static_cast<off_t>(sizeof(DeviceFile)));
  if (errno != 0) {
    return fail(hipErrorOperatingSystem, system_error("sizing the file of the emulated device", path_));
  }
  void *address = mmap(nullptr, sizeof(DeviceFile), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (address == MAP_FAILED) {
    return fail(hipErrorOperatingSystem, system_error("mapping the file of the emulated device", path_));
  }
  file_ = static_cast<DeviceFile *>(address);
  if (file_->magic == 0) {
    file_->magic = kMagic;
    file_->version = kVersion;
  }
  if (file_->magic != kMagic || file_->version != kVersion) {
    return fail(hipErrorInvalidValue, std::string(path_) + " is from another version of this emulation; stop its users and delete it");
  }
  live_bytes_locked();
  bool in_use = false;
  Slot *free_slot = nullptr;
  for (Slot &slot : file_->slots) {
    in_use = in_use || slot.pid != 0;
    free_slot = (free_slot == nullptr && slot.pid == 0) ? &slot : free_slot;
  }
  if (in_use && file_->capacity_bytes != capacity_bytes) {
    return fail(hipErrorInvalidValue, "emulated device " + std::string(path_) + " is in use with " +
                                          mebibytes(file_->capacity_bytes) + ", and this process asks for " +
                                          mebibytes(capacity_bytes) + "; give " + kSizeVariable + " the same value or name another device in " +
                                          kNameVariable);
  }
  if (free_slot == nullptr) {
    return fail(hipErrorOutOfMemory, "emulated device " + std::string(path_) + " already serves " + std::to_string(kMaxProcesses) +
                                         " processes; name another device in " + kNameVariable);
  }
  file_->capacity_bytes = capacity_bytes;
  std::memset(free_slot, 0, sizeof(Slot));
  free_slot->start_ticks = start_ticks(getpid());
  free_slot->pid = getpid();
  slot_ = free_slot;
  return hipSuccess;
}

int64_t Device::live_bytes_locked() {
  int64_t total_bytes = 0;
  for (Slot &slot : file_->slots) {
    if (slot.pid == 0) {
      continue;
    }
    if (&slot != slot_ && start_ticks(slot.pid) != slot.start_ticks) {
      std::memset(&slot, 0, sizeof(Slot)); // the process is dead, and its memory is free
      continue;
    }
    total_bytes += slot.created_bytes;
  }
  return total_bytes;
}

hipError_t Device::claim(int64_t bytes) {
  FileLock lock(fd_);
  const int64_t used_bytes = live_bytes_locked();
  if (used_bytes + bytes > file_->capacity_bytes) {
    ++slot_->refused_creates;
    return fail(hipErrorOutOfMemory, "out of memory: the emulated device has " + mebibytes(file_->capacity_bytes - used_bytes) + " of " +
                                         mebibytes(file_->capacity_bytes) + " (" + kSizeVariable + ") free, and " + mebibytes(bytes) +
                                         " are needed");
  }
  slot_->created_bytes += bytes;
  ++slot_->creates;
  return hipSuccess;
}

void Device::give_back(int64_t bytes) {
  FileLock lock(fd_);
  slot_->created_bytes -= bytes;
  ++slot_->releases;
}

void Device::count_map(int64_t bytes) {
  slot_->mapped_bytes += bytes;
  ++slot_->maps;
}

void Device::count_unmap(int64_t bytes) {
  slot_->mapped_bytes -= bytes;
  ++slot_->unmaps;
}

hipError_t Device::info(size_t *free_bytes, size_t *total_bytes) {
  FileLock lock(fd_);
  *total_bytes = static_cast<size_t>(file_->capacity_bytes);
  *free_bytes = static_cast<size_t>(file_->capacity_bytes - live_bytes_locked());
  return hipSuccess;
}

void Device::detach() {
  if (slot_ == nullptr) {
    return;
  }
  {
    FileLock lock(fd_);
    std::memset(slot_, 0, sizeof(Slot));
    slot_ = nullptr;
    live_bytes_locked();
    bool in_use = false;
    for (const Slot &slot : file_->slots) {
      in_use = in_use || slot.pid != 0;
    }
    if (!in_use) {
      unlink(path_);
    }
  }
  munmap(file_, sizeof(DeviceFile));
  file_ = nullptr;
  close(fd_);
  fd_ = -1;
}

void Device::abandon_in_forked_child() {
  // The slot belongs to the parent. The descriptor must be closed: it shares the parent's lock.
  if (file_ != nullptr) {
    munmap(file_, sizeof(DeviceFile));
    close(fd_);
  }
  file_ = nullptr;
  slot_ = nullptr;
  fd_ = -1;
}

} // namespace hostvmm
