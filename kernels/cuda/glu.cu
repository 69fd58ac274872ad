// `glu`, `glu_grad`, and both at once. Macros: X, UP and DY (element types of gate, up and the gradient), ACT (one of
// activation.cuh), UNROLL, AMAX (bit i: takes the amax of result i, into the i-th of `amax`).

#include "common.cuh"
#include "activation.cuh"
#include "amax.cuh"

// Element I of y, of which the largest magnitude is kept if it is asked for.
template <int I> __device__ __forceinline__ void put(float* y, float value, float* most) {
    y[I] = value;
    if constexpr (AMAX >> I & 1) most[I] = fmaxf(most[I], fabsf(value));
}

template <int I, class Type> __device__ __forceinline__ void take(Type* amax, const float* most) {
    if constexpr (AMAX >> I & 1) take_amax(amax, most[I]);
}

extern "C" __global__ void glu(X* y, X* y_amax, const X* gate, const UP* up, i64 n) {
    float most[1] = {};
    map<vector_length<X, UP>(), UNROLL>(n, tensors(y), tensors(gate, up), [&](const float* x, float* y) {
        put<0>(y, ACT::apply(x[0]) * x[1], most);
    });
    take<0>(y_amax, most);
}

extern "C" __global__ void glu_grad(
    X* dgate, UP* dup, X* dgate_amax, UP* dup_amax, const DY* dy, const X* gate, const UP* up, i64 n) {
    float most[2] = {};
    map<vector_length<X, UP, DY>(), UNROLL>(
        n, tensors(dgate, dup), tensors(dy, gate, up), [&](const float* x, float* y) {
            put<0>(y, x[0] * x[2] * ACT::slope(x[1]), most);
            put<1>(y, x[0] * ACT::apply(x[1]), most);
        });
    take<0>(dgate_amax, most);
    take<1>(dup_amax, most);
}

// With what `glu` makes, from the same registers; it may take the place of dy.
extern "C" __global__ void glu_grad_recompute(
    X* dgate, UP* dup, X* again, X* dgate_amax, UP* dup_amax, X* again_amax, const DY* dy, const X* gate,
    const UP* up, i64 n) {
    float most[3] = {};
    map<vector_length<X, UP, DY>(), UNROLL>(
        n, tensors(dgate, dup, again), tensors(dy, gate, up), [&](const float* x, float* y) {
            put<0>(y, x[0] * x[2] * ACT::slope(x[1]), most);
            put<1>(y, x[0] * ACT::apply(x[1]), most);
            put<2>(y, ACT::apply(x[1]) * x[2], most);
        });
    take<0>(dgate_amax, most);
    take<1>(dup_amax, most);
    take<2>(again_amax, most);
}
