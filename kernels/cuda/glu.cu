// `glu`, `glu_grad`, and both at once. Macros: X, UP and DY (element types of gate, up and the gradient), ACT (one of
// activation.cuh), UNROLL.

#include "common.cuh"
#include "activation.cuh"

extern "C" __global__ void glu(X* y, const X* gate, const UP* up, i64 n) {
    map<vector_length<X, UP>(), UNROLL>(n, tensors(y), tensors(gate, up), [](const float* x, float* y) {
        y[0] = ACT::apply(x[0]) * x[1];
    });
}

extern "C" __global__ void glu_grad(X* dgate, UP* dup, const DY* dy, const X* gate, const UP* up, i64 n) {
    map<vector_length<X, UP, DY>(), UNROLL>(
        n, tensors(dgate, dup), tensors(dy, gate, up), [](const float* x, float* y) {
            y[0] = x[0] * x[2] * ACT::slope(x[1]);
            y[1] = x[0] * ACT::apply(x[1]);
        });
}

// With what `glu` makes, from the same registers; it may take the place of dy.
extern "C" __global__ void glu_grad_recompute(
    X* dgate, UP* dup, X* again, const DY* dy, const X* gate, const UP* up, i64 n) {
    map<vector_length<X, UP, DY>(), UNROLL>(
        n, tensors(dgate, dup, again), tensors(dy, gate, up), [](const float* x, float* y) {
            y[0] = x[0] * x[2] * ACT::slope(x[1]);
            y[1] = x[0] * ACT::apply(x[1]);
            y[2] = ACT::apply(x[1]) * x[2];
        });
}
