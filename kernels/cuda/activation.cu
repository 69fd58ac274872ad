// `activation` and `activation_grad`. Macros: X and DY (element types), ACT (one of activation.cuh),
// UNROLL.

#include "common.cuh"
#include "activation.cuh"

extern "C" __global__ void activation(X* y, const X* x, i64 n) {
    map<vector_length<X>(), UNROLL>(n, tensors(y), tensors(x), [](const float* x, float* y) {
        y[0] = ACT::apply(x[0]);
    });
}

extern "C" __global__ void activation_grad(X* dx, const DY* dy, const X* x, i64 n) {
    map<vector_length<X, DY>(), UNROLL>(n, tensors(dx), tensors(dy, x), [](const float* x, float* y) {
        y[0] = x[0] * ACT::slope(x[1]);
    });
}
