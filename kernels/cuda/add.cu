// `add`: the sum of tensors of one shape. Macros: X (element type of operand 0 and the result), B
// (that of operand 1, for `add`), VECTOR (elements of a vector), UNROLL.

#include "common.cuh"

// Two operands.
extern "C" __global__ void add(X* y, const X* a, const B* b, i64 n) {
    map<VECTOR, UNROLL>(n, tensors(y), tensors(a, b), [](const float* x, float* y) { y[0] = x[0] + x[1]; });
}

// An operand, and its element type: 0 f32, 1 bf16, 2 i32.
struct Term {
    const void* at;
    u64 dtype;
};

template <int M> __device__ __forceinline__ void load_term(Term term, i64 at, float* x) {
    switch (term.dtype) {
        case 0: load<M>((const f32*)term.at + at, x); break;
        case 1: load<M>((const bf16*)term.at + at, x); break;
        default: load<M>((const i32*)term.at + at, x);
    }
}

template <int M> __device__ void add_terms(X* y, const Term* terms, int n_terms, i64 at) {
    float sum[M];
    load_term<M>(terms[0], at, sum);
    for (int t = 1; t < n_terms; t++) {
        float x[M];
        load_term<M>(terms[t], at, x);
#pragma unroll
        for (int i = 0; i < M; i++) sum[i] += x[i];
    }
    store<M>(y + at, sum);
}

// Any number of operands.
extern "C" __global__ void add_many(X* y, const Term* terms, int n_terms, i64 n) {
    i64 stride = gridDim.x * (i64)blockDim.x * VECTOR;
    for (i64 at = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * VECTOR; at < n; at += stride) {
        if (at + VECTOR <= n) {
            add_terms<VECTOR>(y, terms, n_terms, at);
        } else {
            for (i64 i = at; i < n; i++) add_terms<1>(y, terms, n_terms, i);
        }
    }
}

// Many operands of few elements: a block an element, whose threads share the operands.
extern "C" __global__ void add_scalars(X* y, const Term* terms, int n_terms, i64 n) {
    for (i64 at = blockIdx.x; at < n; at += gridDim.x) {
        float sum = 0.0f;
        for (int t = threadIdx.x; t < n_terms; t += blockDim.x) {
            float x[1];
            load_term<1>(terms[t], at, x);
            sum += x[0];
        }
        sum = block_sum(sum);
        if (threadIdx.x == 0) y[at] = from_f32<X>(sum);
    }
}
