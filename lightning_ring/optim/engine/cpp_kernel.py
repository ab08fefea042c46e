"""The source of the CPU kernel: a rule's arithmetic in loops over many tensors."""

from __future__ import annotations

import torch

from lightning_ring.optim.engine.parameter_list import TensorKind
from lightning_ring.optim.engine.rule import Rule
from lightning_ring.optim.engine.trace import Body, element_types, measure_body, move_body

CHUNK = 1 << 15  # elements that a thread takes at a time
BLOCK = 64  # elements between two rounds of prefetching
# bytes: hardware prefetching stops at the end of every 4 KiB page, in each of up to six streams
AHEAD = 2048

C_TYPES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "_Float16",
}

PRELUDE = r"""
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

using std::sqrt;

struct bf16 {
  uint16_t bits;
  bf16() = default;
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  explicit bf16(float value) {  // to nearest, ties to even; NaN stays NaN
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    bits = uint16_t((wide & 0x7fffffff) > 0x7f800000 ? ((wide >> 16) | 0x40) : rounded);
  }
};

template <int64_t elements, int64_t ahead, class T>
static inline void prefetch(const T* position) {
  const char* const first = reinterpret_cast<const char*>(position) + ahead;
  for (int64_t byte = 0; byte < elements * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(first + byte);
}

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel

// Runs work(chunk) for every chunk; threads take the next one when they are done, sums are kept by chunk, so that they
// have the same bits with any number of threads.
template <class Work>
static void for_each_chunk(int64_t num_chunks, int num_threads, Parallel parallel, Work work) {
  std::atomic<int64_t> next{0};
  auto take = [&] {
    for (int64_t chunk; (chunk = next.fetch_add(1)) < num_chunks;) work(chunk);
  };
  if (num_threads > 1 && parallel != nullptr) {
    parallel([](void* take_) { (*static_cast<decltype(take)*>(take_))(); }, &take, unsigned(num_threads), 0);
    return;
  }
  std::vector<std::thread> threads;
  for (int i = 1; i < num_threads; ++i) threads.emplace_back(take);
  take();
  for (auto& thread : threads) thread.join();
}
"""

FUNCTION = r"""
extern "C" void %(name)s(int64_t num_chunks, const int64_t* chunks, const int64_t* pointers, const double* scalars,
                         double* sums, int num_threads, Parallel parallel) {
  for_each_chunk(num_chunks, num_threads, parallel, [=](int64_t turn) {
    const int64_t chunk = %(chunk)s;
    const int64_t row = chunks[3 * chunk], start = chunks[3 * chunk + 1], size = chunks[3 * chunk + 2];
    const int64_t* const pointer = pointers + row * %(num_pointers)d;
    const double* const scalar = scalars + row * %(num_scalars)d;
%(setup)s
%(loop)s
  });
}
"""


def source(rule: type[Rule], kind: TensorKind) -> str:
    """C++ with the functions ``measure`` and ``move``.

    ``pointers`` has a row for each parameter: the addresses of its `element_types`, and whether
    they are aligned.
    """
    types, compute = element_types(rule, kind, C_TYPES)
    measure = _function("measure", measure_body(rule), types, compute)
    return PRELUDE + measure + _function("move", move_body(rule), types, compute)


def _function(name: str, body: Body, types: dict[str, str], compute: str) -> str:
    stored = {element for element, _ in body.stores}
    setup, prefetches = [], []
    for column, element in enumerate(types):
        written = element in stored or (element == "mirror" and "w" in stored)
        if element in body.loads or written:
            qualifier = "" if written else "const "
            cast = f"reinterpret_cast<{qualifier}{types[element]}*>(pointer[{column}])"
            setup.append(
                f"{qualifier}{types[element]}* __restrict const p_{element} = {cast} + start;"
            )
            prefetches.append(f"prefetch<{BLOCK}, {AHEAD}>(p_{element} + begin);")
    setup += [f"const {compute} h_{scalar} = scalar[{i}];" for i, scalar in enumerate(body.scalars)]

    loop = [f"const {compute} {element} = p_{element}[i];" for element in body.loads]
    loop += [f"const {compute} {target} = {expression};" for target, expression in body.statements]
    loop += [f"p_{element}[i] = {types[element]}({value});" for element, value in body.stores]
    if name == "move":
        if "mirror" in types:
            new_w = dict(body.stores)["w"]
            loop.append(f"p_mirror[i] = {types['mirror']}({new_w});")
        clause, after = "", []
    else:
        setup.append("double w_squares = 0, x_squares = 0;")
        loop.append("w_squares += double(w) * double(w);")
        loop.append(f"x_squares += double({body.result}) * double({body.result});")
        clause = " reduction(+ : w_squares, x_squares)"
        after = ["sums[2 * chunk] = w_squares;", "sums[2 * chunk + 1] = x_squares;"]
    lines = [
        f"for (int64_t begin = 0; begin < size; begin += {BLOCK}) {{",
        f"  const int64_t end = std::min<int64_t>(begin + {BLOCK}, size);",
        *[f"  {x}" for x in prefetches],
        f"#pragma omp simd{clause}",
        "  for (int64_t i = begin; i < end; ++i) {",
        *[f"    {x}" for x in loop],
        "  }",
        "}",
        *after,
    ]
    return FUNCTION % {
        "name": name,
        # Backwards, the move begins with what the measuring left in the cache.
        "chunk": "num_chunks - 1 - turn" if name == "move" else "turn",
        "num_pointers": len(types) + 1,
        "num_scalars": max(len(body.scalars), 1),
        "setup": "\n".join(f"    {line}" for line in setup),
        "loop": "\n".join(f"    {line}" for line in lines),
    }
