// SPDX-License-Identifier: Apache-2.0
#include "process.hpp"

#include <pthread.h>
#include <unistd.h>

namespace hostvmm {
namespace {

void before_fork();
void after_fork_in_parent();
void after_fork_in_child();

Process *&process_pointer() {
  static Process *process = [] {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return new Process;
  }();
  return process;
}

void before_fork() { process_pointer()->mutex.lock(); }
void after_fork_in_parent() { process_pointer()->mutex.unlock(); }
void after_fork_in_child() {
  // As with CUDA, a child inherits nothing: the addresses are not mapped in it (MADV_DONTFORK), and it does not know the
  // old handles. The descriptor is closed, or a child that outlives its parent would keep the parent's memory.
  Process *parent = process_pointer();
  process_pointer() = new Process;
  for (auto &device : parent->devices) {
    device.abandon_in_forked_child();
  }
  if (parent->file >= 0) {
    close(parent->file);
  }
}

// Runs after every static destructor of the library it is linked into.
__attribute__((destructor)) void leave_devices() {
  std::lock_guard<std::mutex> lock((*process_pointer()).mutex);
  for (auto &device : (*process_pointer()).devices) {
    device.detach();
  }
}

} // namespace

Process &process() { return *process_pointer(); }

} // namespace hostvmm
