// Sums of squares of many tensors: one launch for parts, one to add them up. All in f64, in which the
// square of an f32 is exact, and in fixed order. Macro: X, the tensors' element type.
#include "common.cuh"

constexpr int THREADS = 256;
// Elements of a part; `CHUNK` on the host's side.
constexpr int CHUNK = 32768;

// A row of the table: a tensor, its parts, and where its sum goes.
struct Tensor {
    const X* x;
    float* out;
    i64 n, first_part, n_parts;
};

template <int N> __device__ __forceinline__ void add_squares(const X* at, f64& sum) {
    float x[N];
    load<N>(at, x);
#pragma unroll
    for (int j = 0; j < N; j++) sum += (f64)x[j] * (f64)x[j];
}

// A block for each (tensor, chunk) pair.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_squares_parts(const Tensor* __restrict__ tensors, const uint2* __restrict__ chunks,
                  f64* __restrict__ parts) {
    uint2 chunk = chunks[blockIdx.x];
    Tensor t = tensors[chunk.x];
    i64 first = (i64)chunk.y * CHUNK, end = min(first + CHUNK, t.n);
    constexpr int N = 16 / sizeof(X);
    i64 whole = first + (end - first) / N * N;
    f64 sum = 0;
#pragma unroll 4
    for (i64 i = first + threadIdx.x * N; i < whole; i += THREADS * N) add_squares<N>(t.x + i, sum);
    if (whole + threadIdx.x < end) add_squares<1>(t.x + whole + threadIdx.x, sum);
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[t.first_part + chunk.y] = sum;
}

// A block for each tensor.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_squares(const Tensor* __restrict__ tensors, const f64* __restrict__ parts) {
    Tensor t = tensors[blockIdx.x];
    f64 sum = 0;
    for (i64 i = threadIdx.x; i < t.n_parts; i += THREADS) sum += parts[t.first_part + i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *t.out = (float)sum;
}
