// `glu`, `glu_grad`, and both at once. Macros: X, UP and DY (element types of gate, up and the gradient), ACT (one of
// activation.cuh), Y0 .. (of results: as they are, or codes), those of put.cuh; no sums of `glu`.

#include "common.cuh"
#include "activation.cuh"
#include "put.cuh"

extern "C" __global__ void glu(
    Y0* y, Made<Y0>::amax* y_amax, const float* y_scale, const X* gate, const UP* up, i64 n) {
    float most[1] = {}, scale = scale_of<Y0>(y_scale);
    map<vector_length<X, UP>(), UNROLL>(n, tensors(y), tensors(gate, up), [&](const float* x, float* y) {
        put<0, Y0>(y, ACT::apply(x[0]) * x[1], scale, most, nullptr);
    });
    take<0>(y_amax, most);
}

extern "C" __global__ void glu_grad(
    Y0* dgate, Y1* dup, Made<Y0>::amax* dgate_amax, Made<Y1>::amax* dup_amax, const float* dgate_scale,
    const float* dup_scale, const DY* dy, const X* gate, const UP* up, i64 n, float* parts, i64 rows, i64 columns,
    i64 rows_each) {
    float most[2] = {}, scale[2] = {scale_of<Y0>(dgate_scale), scale_of<Y1>(dup_scale)};
    auto f = [&](const float* x, float* y, float* sum) {
        put<0, Y0>(y, x[0] * x[2] * ACT::slope(x[1]), scale[0], most, sum);
        put<1, Y1>(y, x[0] * ACT::apply(x[1]), scale[1], most, sum);
    };
    Sums sums = {parts, rows, columns, rows_each};
    map_summed<vector_length<X, UP, DY>()>(n, sums, tensors(dgate, dup), tensors(dy, gate, up), f);
    take<0>(dgate_amax, most);
    take<1>(dup_amax, most);
}

// With what `glu` makes, from the same registers; it may take the place of dy.
extern "C" __global__ void glu_grad_recompute(
    Y0* dgate, Y1* dup, Y2* again, Made<Y0>::amax* dgate_amax, Made<Y1>::amax* dup_amax, Made<Y2>::amax* again_amax,
    const float* dgate_scale, const float* dup_scale, const float* again_scale, const DY* dy, const X* gate,
    const UP* up, i64 n, float* parts, i64 rows, i64 columns,
    i64 rows_each) {
    float most[3] = {};
    float scale[3] = {scale_of<Y0>(dgate_scale), scale_of<Y1>(dup_scale), scale_of<Y2>(again_scale)};
    auto f = [&](const float* x, float* y, float* sum) {
        put<0, Y0>(y, x[0] * x[2] * ACT::slope(x[1]), scale[0], most, sum);
        put<1, Y1>(y, x[0] * ACT::apply(x[1]), scale[1], most, sum);
        put<2, Y2>(y, ACT::apply(x[1]) * x[2], scale[2], most, sum);
    };
    Sums sums = {parts, rows, columns, rows_each};
    map_summed<vector_length<X, UP, DY>()>(n, sums, tensors(dgate, dup, again), tensors(dy, gate, up), f);
    take<0>(dgate_amax, most);
    take<1>(dup_amax, most);
    take<2>(again_amax, most);
}
