// `rms_norm_grad` and `layer_norm_grad`. Macros: X, DY and W (element types of rows, of the gradient and
// of the weight), LAYER, RESIDUAL, ROW_THREADS and VECTORS as in norm.cu, RESIDENT (blocks that a multiprocessor
// has room for: the grid is as many as run at once), AMAX (1 takes the amax of `dx`).
//
// A block does many rows, and sums its share of the gradients of weight and bias: rows of `dw_parts`
// and `db_parts`, one for each group of ROW_THREADS threads of the grid, which sum_leading.cu adds up.

#include "amax.cuh"
#include "common.cuh"
#include "norm.cuh"

#if VECTORS
constexpr int LENGTH = 16 / sizeof(X);
#else
constexpr int LENGTH = 1;
#endif

__device__ __forceinline__ int column_of(int step) {
    return (step * ROW_THREADS + threadIdx.x % ROW_THREADS) * LENGTH;
}

struct Stats {
    float mean, rstd;
};

// The sums over the row of dn * (x - mean) and, with a mean, of dn, for the elements of one vector.
template <class Dy>
__device__ __forceinline__ void add_dots(float (&sums)[1 + LAYER], Dy dy, Vector<X, LENGTH> x,
                                         Vector<W, LENGTH> w, Stats stats, float center) {
#pragma unroll
    for (int k = 0; k < LENGTH; k++) {
        float dn = dy[k] * (w[k] + center);
        sums[0] += dn * (x[k] - stats.mean);
        if constexpr (LAYER) sums[LAYER] += dn;
    }
}

// The gradient of one vector of a row; adds to those of weight and bias.
template <class Dy>
__device__ __forceinline__ void gradient(float* dx, float* dw, float* db, Dy dy, Vector<X, LENGTH> x,
                                         Vector<W, LENGTH> w, Stats stats, float center, float dot,
                                         float sum) {
#pragma unroll
    for (int k = 0; k < LENGTH; k++) {
        float normed = (x[k] - stats.mean) * stats.rstd;
        dx[k] = stats.rstd * (dy[k] * (w[k] + center) - sum - normed * dot);
        dw[k] += dy[k] * normed;
        if constexpr (LAYER) db[k] += dy[k];
    }
}

__device__ __forceinline__ void add_residual(float* dx, const X* dres) {
    Vector<X, LENGTH> r = load_vector<LENGTH>(dres);
#pragma unroll
    for (int k = 0; k < LENGTH; k++) dx[k] += r[k];
}

// Takes the magnitudes of a vector of `dx` into the largest so far.
__device__ __forceinline__ void observe(float& most, const float* dx) {
#pragma unroll
    for (int k = 0; k < (AMAX ? LENGTH : 0); k++) most = fmaxf(most, fabsf(dx[k]));
}

// `dx` may be the memory of `dres`.
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
normalize_grad(X* dx, float* dw_parts, float* db_parts, X* amax, const DY* dy, const X* x, const W* w,
               const float* mean, const float* rstd, const X* dres, i64 rows, int columns, float center) {
    constexpr int ROWS_EACH = BLOCK / ROW_THREADS;
    i64 part = blockIdx.x * (i64)ROWS_EACH + threadIdx.x / ROW_THREADS;
    i64 n_parts = gridDim.x * (i64)ROWS_EACH;
    float share = 1.0f / columns, most = 0.0f;
    dw_parts += part * columns;
    db_parts += LAYER ? part * columns : 0;
#if VECTORS
    Vector<W, LENGTH> wv[VECTORS];
    float dw[VECTORS][LENGTH] = {}, db[LAYER ? VECTORS : 1][LENGTH] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (column_of(i) < columns) wv[i] = load_vector<LENGTH>(w + column_of(i));
    }
    for (i64 index = part; index < rows; index += n_parts) {
        i64 at = index * columns;
        Vector<X, LENGTH> xv[VECTORS];
        Vector<DY, LENGTH> dyv[VECTORS];
        Stats stats = {LAYER ? mean[index] : 0.0f, rstd[index]};
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (column_of(i) >= columns) continue;
            xv[i] = load_vector<LENGTH>(x + at + column_of(i));
            dyv[i] = load_vector<LENGTH>(dy + at + column_of(i));
        }
        float sums[1 + LAYER] = {};
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (column_of(i) < columns) add_dots(sums, dyv[i], xv[i], wv[i], stats, center);
        }
        row_sum(sums);
        float dot = sums[0] * share * stats.rstd, sum = LAYER ? sums[LAYER] * share : 0.0f;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            if (column_of(i) >= columns) continue;
            float to[LENGTH];
            gradient(to, dw[i], db[LAYER ? i : 0], dyv[i], xv[i], wv[i], stats, center, dot, sum);
            if constexpr (RESIDUAL) add_residual(to, dres + at + column_of(i));
            observe(most, to);
            store<LENGTH>(dx + at + column_of(i), to);
        }
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        if (column_of(i) >= columns) continue;
        store<LENGTH>(dw_parts + column_of(i), dw[i]);
        if constexpr (LAYER) store<LENGTH>(db_parts + column_of(i), db[i]);
    }
#else
    // Each thread always has the same columns, so it alone adds to its part of the sums.
    int steps = (columns - column_of(0) + ROW_THREADS - 1) / ROW_THREADS;
    for (int i = 0; i < steps; i++) {
        dw_parts[column_of(i)] = 0.0f;
        if constexpr (LAYER) db_parts[column_of(i)] = 0.0f;
    }
    for (i64 index = part; index < rows; index += n_parts) {
        i64 at = index * columns;
        Stats stats = {LAYER ? mean[index] : 0.0f, rstd[index]};
        float sums[1 + LAYER] = {};
        for (int i = 0; i < steps; i++) {
            int column = column_of(i);
            add_dots(sums, load_vector<1>(dy + at + column), load_vector<1>(x + at + column),
                     load_vector<1>(w + column), stats, center);
        }
        row_sum(sums);
        float dot = sums[0] * share * stats.rstd, sum = LAYER ? sums[LAYER] * share : 0.0f;
        for (int i = 0; i < steps; i++) {
            int column = column_of(i);
            float to[1], dw[1] = {dw_parts[column]}, db[1] = {LAYER ? db_parts[column] : 0.0f};
            gradient(to, dw, db, load_vector<1>(dy + at + column), load_vector<1>(x + at + column),
                     load_vector<1>(w + column), stats, center, dot, sum);
            if constexpr (RESIDUAL) add_residual(to, dres + at + column);
            observe(most, to);
            store<1>(dx + at + column, to);
            dw_parts[column] = dw[0];
            if constexpr (LAYER) db_parts[column] = db[0];
        }
    }
#endif
    if constexpr (AMAX) take_amax(amax, most);
}
