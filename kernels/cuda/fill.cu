// `fill` with something else than zeros. Macro: E (u8, u16 or u32, as wide as an element).

#include "common.cuh"

// `bits` holds one element, or equal narrower ones.
extern "C" __global__ void fill(E* out, u32 bits, i64 n) {
    constexpr int N = 16 / sizeof(E);
    i64 thread = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    i64 n_vectors = n / N;
    for (i64 i = thread; i < n_vectors; i += gridDim.x * (i64)blockDim.x) {
        reinterpret_cast<uint4*>(out)[i] = uint4{bits, bits, bits, bits};
    }
    i64 last = n_vectors * N + thread;
    if (last < n) out[last] = (E)bits;
}
