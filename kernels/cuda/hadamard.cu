// `hadamard`: each 16 rows of a matrix times the signed Hadamard matrix of `ir::quant::nvfp4`, rounded to bf16.
// Macro: X, the element type.
#include "common.cuh"

constexpr int THREADS = 256, BLOCK = 16;

// Bit i: row i of the matrix is negated.
constexpr u32 NEGATIVE = 0xd7e8;

// A thread for each column of 16 rows. Sums are those of the reference, in its order.
extern "C" __global__ void __launch_bounds__(THREADS)
hadamard(const X* __restrict__ x, X* __restrict__ out, i64 n, i64 n_columns) {
    i64 index = (i64)blockIdx.x * THREADS + threadIdx.x;
    i64 at = index / n_columns * BLOCK * n_columns + index % n_columns;
    if (at >= n) return;
    f64 values[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        values[i] = (f64)to_f32(x[at + i * n_columns]) * (NEGATIVE >> i & 1 ? -0.25 : 0.25);
    }
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
        f64 sum = values[0];
#pragma unroll
        for (int i = 1; i < BLOCK; i++) sum += __popc(i & j) % 2 ? -values[i] : values[i];
        out[at + j * n_columns] = from_f32<X>(rounded<bf16>(__double2float_rn(sum)));
    }
}
