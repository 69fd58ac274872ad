// `bias_add`: a vector added to every row. Macros: X and B (element types of operand and bias), VECTOR
// (elements of a vector, which divides `columns`), INDEX (u32 where that can count the elements, or u64).

#include "common.cuh"

extern "C" __global__ void bias_add(X* y, const X* x, const B* b, INDEX columns, INDEX n_vectors) {
    INDEX threads = (INDEX)gridDim.x * blockDim.x;
    for (INDEX i = (INDEX)blockIdx.x * blockDim.x + threadIdx.x; i < n_vectors; i += threads) {
        float sum[VECTOR], bias[VECTOR];
        load<VECTOR>(x + i * VECTOR, sum);
        load<VECTOR>(b + i * VECTOR % columns, bias);
#pragma unroll
        for (int k = 0; k < VECTOR; k++) sum[k] += bias[k];
        store<VECTOR>(y + i * VECTOR, sum);
    }
}
