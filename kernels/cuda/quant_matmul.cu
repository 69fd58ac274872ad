// `quant_matmul` where the library does not take it: an element of the result for each thread. Macros: A, B
// (the types of the codes), OUT.
#include "codes.cuh"
#include "pieces.cuh"

// Scales are constant over `length` codes of the contraction. The first `n_a` of `dims` say where those of
// `a` are, the next `n_b` those of `b`.
extern "C" __global__ void __launch_bounds__(256)
quant_matmul(OUT* out, const A* __restrict__ a, const B* __restrict__ b, const float* __restrict__ a_scale,
             const float* __restrict__ b_scale, const OUT* c, const OUT* bias,
             const PieceDim* __restrict__ dims, int n_a, int n_b, i64 m, i64 n, i64 k, i64 length) {
    i64 threads = (i64)gridDim.x * blockDim.x;
    for (i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x; at < m * n; at += threads) {
        i64 row = at / n * k, column = at % n * k;
        float sum = 0;
        for (i64 first = 0; first < k; first += length) {
            float product = 0;
            for (i64 i = first; i < first + length; i++) {
                product = fmaf(to_f32(a[row + i]), to_f32(b[column + i]), product);
            }
            float left = a_scale[piece_of(dims, n_a, row + first)];
            float right = b_scale[piece_of(dims + n_a, n_b, column + first)];
            sum = fmaf(product, left * right, sum);
        }
        if (c) sum += to_f32(c[at]);
        if (bias) sum += to_f32(bias[at % n]);
        out[at] = from_f32<OUT>(sum);
    }
}
