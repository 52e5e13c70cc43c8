// The threads of a block. Each has a stack of its own and runs until it waits; then the next runs, in a fixed order.
#include "emulator.hpp"

#include <algorithm>
#include <csetjmp>
#include <memory>
#include <string>
#include <ucontext.h>
#include <utility>
#include <vector>

int emulator_backwards = 0;

namespace emulator {

namespace {

constexpr int WARP = 32;
constexpr size_t STACK = 256 << 10;

enum class State { ready, at_barrier, at_exchange, finished };

struct Thread {
  uint3 index{};
  State state = State::ready;
  const char* where = "";  // the line that it waits at
  Words words{};           // given to the others of its warp
  bool started = false;  // its stack exists and holds its loop
  jmp_buf resume;
  ucontext_t context;
  std::unique_ptr<char[]> stack;
};

std::vector<std::unique_ptr<Thread>> threads;  // kept from launch to launch
Thread* current;
const std::function<void()>* body;
jmp_buf scheduler;
std::string failure;
std::array<Words, WARP> gathered;  // the words of the warp that runs

std::vector<std::pair<void*, size_t>>& shared_memory() {
  static std::vector<std::pair<void*, size_t>> all;
  return all;
}

// A thread of the emulator runs the thread `current` of one block, then the thread `current` of the next block.
void forever() {
  for (;;) {
    (*body)();
    current->state = State::finished;
    if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
  }
}

// Returns when the thread waits or ends.
__attribute__((noinline)) void resume(Thread& t) {
  current = &t;
  threadIdx = t.index;
  if (_setjmp(scheduler) != 0) return;
  if (t.started) _longjmp(t.resume, 1);
  t.started = true;
  if (!t.stack) t.stack.reset(new char[STACK]);
  getcontext(&t.context);
  t.context.uc_stack.ss_sp = t.stack.get();
  t.context.uc_stack.ss_size = STACK;
  makecontext(&t.context, forever, 0);
  setcontext(&t.context);
}

__attribute__((noinline)) void wait(State state, const char* where) {
  current->state = state;
  current->where = where;
  if (_setjmp(current->resume) == 0) _longjmp(scheduler, 1);
}

// Returns whether threads [begin, end) are in this state, at one place. CUDA does not define what some but not all do.
bool all_at(State state, int begin, int end) {
  int count = 0;
  for (int i = begin; i < end; i++) count += threads[i]->state == state && threads[i]->where == threads[begin]->where;
  if (count == end - begin) return true;
  for (int i = begin; i < end && failure.empty(); i++)
    if (threads[i]->state == state)
      failure = std::string(threads[i]->where) + ": not every thread comes here";
  return false;
}

// Runs until all threads of the warp wait for the block, or have ended.
void run_warp(int begin, int end) {
  for (;;) {
    for (int i = begin; i < end; i++) {
      Thread& t = *threads[emulator_backwards ? end - 1 - (i - begin) : i];
      if (t.state == State::ready) resume(t);
    }
    if (!all_at(State::at_exchange, begin, end)) return;
    for (int i = begin; i < end; i++) {
      gathered[i - begin] = threads[i]->words;
      threads[i]->state = State::ready;
    }
  }
}

void run_block(int count) {
  for (const auto& [begin, bytes] : shared_memory()) std::memset(begin, 0xff, bytes);
  do {
    for (int i = 0; i < count; i++) threads[i]->state = State::ready;
    const int warps = (count + WARP - 1) / WARP;
    for (int i = 0; i < warps && failure.empty(); i++) {
      const int warp = emulator_backwards ? warps - 1 - i : i;
      run_warp(warp * WARP, std::min(count, (warp + 1) * WARP));
    }
  } while (failure.empty() && all_at(State::at_barrier, 0, count));
}

}  // namespace

SharedMemory::SharedMemory(void* begin, size_t bytes) {
  std::memset(begin, 0xff, bytes);  // the first block is under way
  shared_memory().emplace_back(begin, bytes);
}

void barrier(const char* where) { wait(State::at_barrier, where); }

const Words* gather(const char* where, uint32_t mask, const Words& mine) {
  if (mask != 0xffffffffu && failure.empty()) failure = std::string(where) + ": only whole warps are emulated";
  current->words = mine;
  wait(State::at_exchange, where);
  return gathered.data();
}

void run(const Configuration& how, const std::function<void()>& thread) {
  const dim3 grid = how.grid, block = how.block;
  const int count = static_cast<int>(block.x);
  if (grid.x < 1 || grid.x > 0x7fffffffu || grid.y < 1 || grid.y > 65535 || grid.z != 1 || count < 1 || count > 1024 ||
      block.y != 1 || block.z != 1 || how.dynamic_shared != 0)
    return fail("no such grid");
  if (how.stream != STREAM) return fail("a launch on another stream than torch's");
  while (static_cast<int>(threads.size()) < count) {
    threads.push_back(std::make_unique<Thread>());
    threads.back()->index.x = static_cast<unsigned>(threads.size()) - 1;
  }
  body = &thread;
  gridDim = grid;
  blockDim = block;
  failure.clear();
  const int64_t blocks = int64_t{grid.x} * grid.y;
  for (int64_t i = 0; i < blocks && failure.empty(); i++) {
    const int64_t b = emulator_backwards ? blocks - 1 - i : i;
    blockIdx = {static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x), 0};
    run_block(count);
  }
  if (failure.empty()) return;
  for (auto& t : threads) t->started = false;  // their stacks hold calls that never end
  fail(failure);
}

}  // namespace emulator
