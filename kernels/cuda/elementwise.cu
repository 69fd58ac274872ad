// `cast`, `scale`, `mul` and `div`. Macros: X and Y (element types of operands and result), UNROLL.

#include "common.cuh"

extern "C" __global__ void cast(Y* y, const X* x, i64 n) {
    map<vector_length<X, Y>(), UNROLL>(n, tensors(y), tensors(x), [](const float* x, float* y) {
        y[0] = x[0];
    });
}

extern "C" __global__ void scale(Y* y, const X* x, float factor, i64 n) {
    map<vector_length<X, Y>(), UNROLL>(n, tensors(y), tensors(x), [=](const float* x, float* y) {
        y[0] = factor * x[0];
    });
}

extern "C" __global__ void mul(Y* y, const X* a, const X* b, i64 n) {
    map<vector_length<X, Y>(), UNROLL>(n, tensors(y), tensors(a, b), [](const float* x, float* y) {
        y[0] = x[0] * x[1];
    });
}

extern "C" __global__ void div(Y* y, const X* a, const X* b, i64 n) {
    map<vector_length<X, Y>(), UNROLL>(n, tensors(y), tensors(a, b), [](const float* x, float* y) {
        y[0] = x[0] / x[1];
    });
}
