// `rms_norm` and `layer_norm`. Macros: X, W and B (element types of rows, weight and bias), LAYER (1
// subtracts the mean and adds the bias), RESIDUAL (1 adds `r` to `x` first), ROW_THREADS (of a row:
// 32 .. 1024, a block for a row unless 32), VECTORS (of 16 bytes that each of them holds; 0 for rows
// that are not held but read again, for any number of columns), Y (of `y`: X, or codes), AMAX (1 takes
// the amax of `y`).

#include "amax.cuh"
#include "codes.cuh"
#include "common.cuh"
#include "norm.cuh"

// A row as its threads see it: this thread's part is `steps` vectors, ROW_THREADS vectors apart.
struct Row {
#if VECTORS
    static constexpr int LENGTH = 16 / sizeof(X), STEPS = VECTORS;
    Vector<X, LENGTH> held[VECTORS];
#else
    static constexpr int LENGTH = 1;
    int STEPS;
#endif
    const X* from;
    int columns;

    static __device__ __forceinline__ int column(int step) {
        return (step * ROW_THREADS + threadIdx.x % ROW_THREADS) * LENGTH;
    }

    // Of the row that starts at `x`.
    __device__ __forceinline__ Row(const X* x, int columns) : from(x), columns(columns) {
#if VECTORS
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (column(i) < columns) held[i] = load_vector<LENGTH>(x + column(i));
        }
#else
        STEPS = (columns + ROW_THREADS - 1) / ROW_THREADS;
#endif
    }

    __device__ __forceinline__ Vector<X, LENGTH> operator[](int step) const {
#if VECTORS
        return held[step];
#else
        return load_vector<LENGTH>(from + column(step));
#endif
    }

    // Adds a row, rounds, and writes the sum to `to`, where it is read again if it is not held.
    __device__ __forceinline__ void add(const Row& other, X* to) {
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (column(i) >= columns) continue;
            Vector<X, LENGTH> a = (*this)[i], b = other[i];
            float sum[LENGTH];
#pragma unroll
            for (int k = 0; k < LENGTH; k++) sum[k] = a[k] + b[k];
            store<LENGTH>(to + column(i), sum);
#if VECTORS
#pragma unroll
            for (int k = 0; k < LENGTH; k++) held[i].element[k] = from_f32<X>(sum[k]);
#endif
        }
        from = to;
    }

    // The sum over the row of `f` of each element, in every thread.
    template <class F> __device__ __forceinline__ float sum(F f) const {
        float sums[1] = {0.0f};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (column(i) >= columns) continue;
            Vector<X, LENGTH> x = (*this)[i];
#pragma unroll
            for (int k = 0; k < LENGTH; k++) sums[0] += f(x[k]);
        }
        row_sum(sums);
        return sums[0];
    }
};

// y = (x - mean) * rstd * (w + center) + b; without mean and bias, rstd is over the mean square.
extern "C" __global__ void __launch_bounds__(BLOCK)
normalize(Y* y, float* mean_out, float* rstd_out, X* sum_out, Made<Y>::amax* amax, const float* y_scale, const X* x,
          const W* w, const B* b, const X* r, i64 rows, int columns, float eps, float center) {
    constexpr int LENGTH = Row::LENGTH;
    constexpr int ROWS_EACH = BLOCK / ROW_THREADS;
    i64 first = blockIdx.x * (i64)ROWS_EACH + threadIdx.x / ROW_THREADS;
    float share = 1.0f / columns, most = 0.0f, scale = scale_of<Y>(y_scale);
    for (i64 index = first; index < rows; index += gridDim.x * (i64)ROWS_EACH) {
        i64 at = index * columns;
        Row row(x + at, columns);
        if constexpr (RESIDUAL) row.add(Row(r + at, columns), sum_out + at);
        float mean = 0.0f;
        if constexpr (LAYER) mean = row.sum([](float x) { return x; }) * share;
        float squares = row.sum([=](float x) { return (x - mean) * (x - mean); });
        float rstd = 1.0f / sqrtf(squares * share + eps);
        if (threadIdx.x % ROW_THREADS == 0) {
            if constexpr (LAYER) mean_out[index] = mean;
            rstd_out[index] = rstd;
        }
#pragma unroll
        for (int i = 0; i < row.STEPS; i++) {
            int column = Row::column(i);
            if (column >= columns) continue;
            Vector<X, LENGTH> from = row[i];
            Vector<W, LENGTH> weight = load_vector<LENGTH>(w + column);
            float to[LENGTH];
#pragma unroll
            for (int k = 0; k < LENGTH; k++) to[k] = (from[k] - mean) * rstd * (weight[k] + center);
            if constexpr (LAYER) {
                Vector<B, LENGTH> bias = load_vector<LENGTH>(b + column);
#pragma unroll
                for (int k = 0; k < LENGTH; k++) to[k] += bias[k];
            }
            if constexpr (AMAX) {
#pragma unroll
                for (int k = 0; k < LENGTH; k++) most = fmaxf(most, fabsf(to[k]));
            }
#pragma unroll
            for (int k = 0; k < LENGTH; k++) to[k] = scaled<Y>(to[k], scale);
            store<LENGTH>(y + at + column, to);
        }
    }
    if constexpr (AMAX) take_amax(amax, most);
}
