// Results of an elementwise map that may be codes, and whose amaxes and sums of columns may be asked for.
// Macros: AMAX and SUM (bit i: takes the amax, or the sums, of result i), UNROLL (vectors of a thread at a time), VECTOR
// (columns of a thread that takes sums, which divides `columns`), WARPS (of a block that takes sums).
#pragma once

#include "amax.cuh"
#include "codes.cuh"

// Result I of `f` in a map: keeps its largest magnitude in `most` if bit I of AMAX asks for it, and scales it if it
// is to be codes of type Y.
// Adds it to `sum` if bit I of SUM asks for it.
template <int I, class Y>
__device__ __forceinline__ void put(float* y, float value, float scale, float* most, float* sum) {
    if constexpr (AMAX >> I & 1) most[I] = fmaxf(most[I], fabsf(value));
    if constexpr (SUM >> I & 1) sum[I] += value;
    y[I] = scaled<Y>(value, scale);
}

template <int I, class Type> __device__ __forceinline__ void take(Type* amax, const float* most) {
    if constexpr (AMAX >> I & 1) take_amax(amax, most[I]);
}

// Where rows of a matrix are summed: block y takes `rows_each` of `rows`, and writes the sums of its columns as row y of
// `parts` [gridDim.y, columns], of which there is one for each bit of SUM, in order.
struct Sums {
    float* parts;
    i64 rows, columns, rows_each;
};

// Every element of tensors of `n` elements: `f` takes one of each operand to one of each result, and adds to the sums of
// its column, of which there is one for each result. With sums a block has 32 * VECTOR columns, and each warp takes every
// WARPS-th row, so the order of a sum depends on sizes only.
template <int Length, class Out, class In, class F>
__device__ __forceinline__ void map_summed(i64 n, Sums to, Out out, In in, F f) {
    if constexpr (SUM == 0) {
        map<Length, UNROLL>(n, out, in, [&](const float* x, float* y) { f(x, y, nullptr); });
    } else {
        __shared__ float shared[WARPS][32 * VECTOR];
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        i64 tile = blockIdx.x * (i64)(32 * VECTOR), column = tile + lane * VECTOR;
        i64 row = blockIdx.y * to.rows_each, end = min(to.rows, row + to.rows_each);
        float sums[VECTOR][Out::count] = {};
        auto each = [&](const float* x, float* y, int i) { f(x, y, sums[i]); };
        if (column < to.columns) {
            i64 stride = WARPS * to.columns;
            row += warp;
            for (; row + (UNROLL - 1) * WARPS < end; row += UNROLL * WARPS) {
                map_at<UNROLL, VECTOR>(row * to.columns + column, stride, out, in, each);
            }
            for (; row < end; row += WARPS) map_at<1, VECTOR>(row * to.columns + column, 0, out, in, each);
        }
        float* part = to.parts + blockIdx.y * to.columns + tile;
#pragma unroll
        for (int result = 0; result < Out::count; result++) {
            if (!(SUM >> result & 1)) continue;
            // The sums of the result before have been read by all before they are overwritten.
            __syncthreads();
#pragma unroll
            for (int i = 0; i < VECTOR; i++) shared[warp][lane * VECTOR + i] = sums[i][result];
            __syncthreads();
            for (int i = threadIdx.x; i < 32 * VECTOR && tile + i < to.columns; i += 32 * WARPS) {
                float total = 0.0f;
#pragma unroll
                for (int k = 0; k < WARPS; k++) total += shared[k][i];
                part[i] = total;
            }
            part += gridDim.y * to.columns;
        }
    }
}
