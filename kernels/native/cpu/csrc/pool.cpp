#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

namespace {
constexpr int kPieces = 4;     // ranges for each thread, so that a thread that is late takes fewer
constexpr int kSpins = 20000;  // about 0.1 ms, longer than what lies between two products of a decoder

void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int topology(int cpu, const char* what) {
  std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/" + what);
  int value = -1;
  return file >> value ? value : -cpu - 1;  // a CPU of unknown place is a core of its own
}

// One thread for each physical core that the process may use, but one for the caller. They live as long as the process.
// A child process after a fork has none of them, and computes in its own thread.
class Pool {
 public:
  Pool() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    std::set<std::pair<int, int>> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &allowed) &&
          cores.emplace(topology(cpu, "physical_package_id"), topology(cpu, "core_id")).second && cores.size() > 1)
        start(cpu);
  }

  void run(int64_t tasks, int threads, const std::function<void(int64_t, int64_t)>& compute) {
    const int helping = std::min(threads - 1, started_);
    std::unique_lock alone(running_, std::try_to_lock);
    if (helping < 1 || tasks < 2 || !alone.owns_lock()) return compute(0, tasks);
    tasks_ = tasks;
    piece_ = std::max<int64_t>(1, tasks / ((helping + 1) * kPieces));
    compute_ = &compute;
    next_.store(0, std::memory_order_relaxed);
    left_.store(0, std::memory_order_relaxed);
    places_.store(helping, std::memory_order_release);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    take();
    // Whoever comes now finds no place. The threads that came before still compute.
    const int joined = helping - places_.exchange(0, std::memory_order_acq_rel);
    while (left_.load(std::memory_order_acquire) != joined) rest();
  }

 private:
  void start(int cpu) {
    std::thread thread([this] { loop(); });
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(thread.native_handle(), sizeof one, &one);
    thread.detach();
    ++started_;
  }

  void loop() {
    for (uint32_t seen = 0;;) {
      for (int i = 0; i < kSpins && round_.load(std::memory_order_relaxed) == seen; ++i) rest();
      round_.wait(seen, std::memory_order_acquire);  // returns at once if there is a new round
      seen = round_.load(std::memory_order_acquire);
      int places = places_.load(std::memory_order_acquire);
      while (places > 0 && !places_.compare_exchange_weak(places, places - 1, std::memory_order_acq_rel)) {
      }
      if (places < 1) continue;
      take();
      left_.fetch_add(1, std::memory_order_release);
    }
  }

  void take() {
    for (int64_t first; (first = next_.fetch_add(piece_, std::memory_order_relaxed)) < tasks_;)
      (*compute_)(first, std::min(first + piece_, tasks_));
  }

  int started_ = 0;
  std::mutex running_;
  std::atomic<uint32_t> round_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> places_{0}, left_{0};
  int64_t tasks_ = 0, piece_ = 1;
  const std::function<void(int64_t, int64_t)>* compute_ = nullptr;
};
}  // namespace

void accel_pool_run(int64_t tasks, int threads, const std::function<void(int64_t, int64_t)>& compute) {
  if (threads < 2) return compute(0, tasks);
  static Pool* const pool = new Pool;  // never destroyed, because its threads use it until the process ends
  pool->run(tasks, threads, compute);
}
