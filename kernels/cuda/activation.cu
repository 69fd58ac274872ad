// `activation` and `activation_grad`. Macros: X and DY (element types), ACT (one of activation.cuh), Y0 (of the result: X,
// or codes), those of put.cuh; no sums of `activation`.

#include "common.cuh"
#include "activation.cuh"
#include "put.cuh"

extern "C" __global__ void activation(Y0* y, Made<Y0>::amax* amax, const float* y_scale, const X* x, i64 n) {
    float most[1] = {}, scale = scale_of<Y0>(y_scale);
    map<vector_length<X>(), UNROLL>(n, tensors(y), tensors(x), [&](const float* x, float* y) {
        put<0, Y0>(y, ACT::apply(x[0]), scale, most, nullptr);
    });
    take<0>(amax, most);
}

extern "C" __global__ void activation_grad(
    Y0* dx, Made<Y0>::amax* amax, const float* dx_scale, const DY* dy, const X* x, i64 n,
    float* parts, i64 rows, i64 columns, i64 rows_each) {
    float most[1] = {}, scale = scale_of<Y0>(dx_scale);
    auto f = [&](const float* x, float* y, float* sum) {
        put<0, Y0>(y, x[0] * ACT::slope(x[1]), scale, most, sum);
    };
    Sums sums = {parts, rows, columns, rows_each};
    map_summed<vector_length<X, DY>()>(n, sums, tensors(dx), tensors(dy, x), f);
    take<0>(amax, most);
}
