// The threads of accel_cpu_run. ONNX Runtime's operator takes the session's threads instead.
#pragma once
#include <cstdint>
#include <functional>

// Calls ``compute`` with ranges of 0 to tasks - 1 in up to ``threads`` threads, of which the caller is one. Another call
// meanwhile runs in its own thread alone, so there are never more threads than cores at work.
void accel_pool_run(int64_t tasks, int threads, const std::function<void(int64_t, int64_t)>& compute);
