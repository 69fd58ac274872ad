// Sums of columns: `sum_leading`, and the gradients of norms' weights from the parts of their blocks.
// Macros: X and Y (element types of operand and result), VECTOR (columns of a thread, which divides
// `columns`), WARPS (of a block, which share the rows).

#include "common.cuh"

// Part `blockIdx.y` is the sum of `rows_each` rows, and becomes that row of `y`. Each warp takes every
// WARPS-th row, so the order of a sum depends on sizes only.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
sum_rows(Y* y, const X* x, i64 rows, i64 columns, i64 rows_each) {
    __shared__ float parts[WARPS][32 * VECTOR];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 tile = blockIdx.x * (i64)(32 * VECTOR), column = tile + lane * VECTOR;
    i64 first = blockIdx.y * rows_each, end = min((long long)rows, (long long)(first + rows_each));
    float sum[VECTOR] = {};
    if (column < columns) {
#pragma unroll 8
        for (i64 row = first + warp; row < end; row += WARPS) {
            float v[VECTOR];
            load<VECTOR>(x + row * columns + column, v);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) sum[i] += v[i];
        }
    }
#pragma unroll
    for (int i = 0; i < VECTOR; i++) parts[warp][lane * VECTOR + i] = sum[i];
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * VECTOR && tile + i < columns; i += blockDim.x) {
        float total = 0.0f;
#pragma unroll
        for (int k = 0; k < WARPS; k++) total += parts[k][i];
        y[blockIdx.y * columns + tile + i] = from_f32<Y>(total);
    }
}
