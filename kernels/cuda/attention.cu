// Attention of our own, for what no library takes. Macros: X, the element type; D, features of a head.
//
// q[batch, s, heads, D], k, v[batch, t, kv_heads, D], o like q; lse and delta f32 [batch, s, heads].
// A block makes a tile of TILE rows and goes over the other side in tiles; thread (y, x) of 16 x 16
// has rows 4 y .. and columns 4 x .. of a tile of scores. Sums are in f32, in one order always.
#include "common.cuh"

constexpr int THREADS = 256;
// Rows and columns of a tile of scores.
constexpr int TILE = 64;
// Features in shared memory at a time.
constexpr int SLICE = 32;
constexpr int N_SLICES = (D + SLICE - 1) / SLICE;
// Keeps vectors aligned, and the threads that write a column in different banks.
constexpr int PITCH = TILE + 4;

#define INFINITE __int_as_float(0x7f800000)

struct Shared {
    // A slice of the rows of two matrices, transposed: [feature][row].
    alignas(16) float a[SLICE * PITCH], b[SLICE * PITCH];
    // Weights, transposed: [column][row].
    alignas(16) float weights[TILE * PITCH];
    // A slice of rows: [row][feature].
    alignas(16) float rows[TILE * SLICE];
};

// Rows of a tile: the first, from one to the next, and how many there are.
struct Rows {
    const X* at;
    i64 stride;
    int n;
    __device__ __forceinline__ float operator()(int row, int feature) const {
        return row < n && feature < D ? to_f32(at[row * stride + feature]) : 0.0f;
    }
};

// Rows `first` on of one head of `of[batch, n, heads, D]`.
__device__ __forceinline__ Rows rows_of(const X* of, i64 sequence, i64 n, i64 first, int heads,
                                        int head) {
    const X* at = of + ((sequence * n + first) * heads + head) * D;
    return {at, (i64)heads * D, (int)min(n - first, (i64)TILE)};
}

// A warp takes 4 rows by 8 features: different banks, and whole sectors of f32.
__device__ __forceinline__ void load_transposed(float* to, Rows from, int slice) {
#pragma unroll 4
    for (int i = 0; i < TILE * SLICE / THREADS; i++) {
        int lane = threadIdx.x % 32, unit = i * (THREADS / 32) + threadIdx.x / 32;
        int row = unit / 4 * 4 + lane / 8, feature = unit % 4 * 8 + lane % 8;
        to[feature * PITCH + row] = from(row, slice * SLICE + feature);
    }
}

__device__ __forceinline__ void load_rows(float* to, Rows from, int slice) {
#pragma unroll 4
    for (int i = 0; i < TILE * SLICE / THREADS; i++) {
        int at = i * THREADS + threadIdx.x;
        to[at] = from(at / SLICE, slice * SLICE + at % SLICE);
    }
}

__device__ __forceinline__ void read4(const float* at, float* out) {
    float4 four = *reinterpret_cast<const float4*>(at);
    out[0] = four.x, out[1] = four.y, out[2] = four.z, out[3] = four.w;
}

// Products of every row of `a` with every row of `b`.
__device__ __forceinline__ void products(Shared& shared, Rows a, Rows b, float (&out)[4][4]) {
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) out[i][j] = 0;
    }
#pragma unroll 1
    for (int slice = 0; slice < N_SLICES; slice++) {
        __syncthreads();
        load_transposed(shared.a, a, slice);
        load_transposed(shared.b, b, slice);
        __syncthreads();
#pragma unroll 8
        for (int feature = 0; feature < SLICE; feature++) {
            float from_a[4], from_b[4];
            read4(shared.a + feature * PITCH + 4 * y, from_a);
            read4(shared.b + feature * PITCH + 4 * x, from_b);
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) out[i][j] += from_a[i] * from_b[j];
            }
        }
    }
}

// Leaves weights for `accumulate`, once all have read those before.
__device__ __forceinline__ void share_weights(Shared& shared, const float (&weights)[4][4]) {
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float4 four = make_float4(weights[0][j], weights[1][j], weights[2][j], weights[3][j]);
        *reinterpret_cast<float4*>(shared.weights + (4 * x + j) * PITCH + 4 * y) = four;
    }
}

// Features of four rows that a thread has: two of each slice.
typedef float Sums[N_SLICES][4][2];

// Adds the rows of `from` with the shared weights.
__device__ __forceinline__ void accumulate(Shared& shared, Rows from, Sums& sums) {
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int slice = 0; slice < N_SLICES; slice++) {
        __syncthreads();
        load_rows(shared.rows, from, slice);
        __syncthreads();
#pragma unroll 8
        for (int row = 0; row < TILE; row++) {
            float weights[4];
            read4(shared.weights + row * PITCH + 4 * y, weights);
            float2 value = *reinterpret_cast<float2*>(shared.rows + row * SLICE + 2 * x);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[slice][i][0] += weights[i] * value.x;
                sums[slice][i][1] += weights[i] * value.y;
            }
        }
    }
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
    for (int slice = 0; slice < N_SLICES; slice++) {
#pragma unroll
        for (int i = 0; i < 4; i++) sums[slice][i][0] = sums[slice][i][1] = 0;
    }
}

// Writes the rows that exist: to `of[batch, n, heads, D]`, as `rows_of`.
__device__ __forceinline__ void write(const Sums& sums, const float* factor, X* of, i64 sequence, i64 n,
                                      i64 first, int heads, int head) {
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        i64 row = first + 4 * y + i;
        if (row >= n) continue;
        X* to = of + ((sequence * n + row) * heads + head) * D;
#pragma unroll
        for (int slice = 0; slice < N_SLICES; slice++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int feature = slice * SLICE + 2 * x + j;
                if (feature < D) to[feature] = from_f32<X>(sums[slice][i][j] / factor[i]);
            }
        }
    }
}

// Over the 16 threads that share rows.
template <class F> __device__ __forceinline__ float over_row(float value, F f) {
#pragma unroll
    for (int lane = 8; lane; lane /= 2) value = f(value, __shfl_xor_sync(~0u, value, lane));
    return value;
}

// Which tile of which head of which sequence a block makes.
struct Place {
    i64 first, sequence;
    int head;
    __device__ __forceinline__ Place(i64 tile, u32 rest, int heads)
        : first(tile * TILE), sequence(rest / heads), head(rest % heads) {}
};

// A block for each tile of queries, the longest first.
__device__ __forceinline__ Place query_place(i64 s, int heads) {
    u32 n_tiles = (u32)((s + TILE - 1) / TILE), others = gridDim.x / n_tiles;
    return Place(n_tiles - 1 - blockIdx.x / others, blockIdx.x % others, heads);
}

extern "C" __global__ void __launch_bounds__(THREADS, D <= 128 ? 2 : 1)
attention(const X* __restrict__ q, const X* __restrict__ k, const X* __restrict__ v,
          X* __restrict__ o, float* __restrict__ lse, i64 s, i64 t, int heads, int kv_heads, int causal,
          float scale) {
    __shared__ Shared shared;
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
    Place place = query_place(s, heads);
    int kv_head = place.head / (heads / kv_heads);
    Rows queries = rows_of(q, place.sequence, s, place.first, heads, place.head);
    Sums sums;
    clear(sums);
    float max[4], sum[4];
#pragma unroll
    for (int i = 0; i < 4; i++) max[i] = -INFINITE, sum[i] = 0;
    i64 end = causal ? min(t, place.first + TILE) : t;
    for (i64 key = 0; key < end; key += TILE) {
        float scores[4][4];
        products(shared, queries, rows_of(k, place.sequence, t, key, kv_heads, kv_head), scores);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            i64 keys = causal ? min(t, place.first + 4 * y + i + 1) : t;
            float top = max[i];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                scores[i][j] = key + 4 * x + j < keys ? scale * scores[i][j] : -INFINITE;
                top = fmaxf(top, scores[i][j]);
            }
            top = over_row(top, [](float a, float b) { return fmaxf(a, b); });
            float shrink = expf(max[i] - top), part = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                scores[i][j] = expf(scores[i][j] - top);
                part += scores[i][j];
            }
            part = over_row(part, [](float a, float b) { return a + b; });
            max[i] = top;
            sum[i] = sum[i] * shrink + part;
#pragma unroll
            for (int slice = 0; slice < N_SLICES; slice++) {
                sums[slice][i][0] *= shrink;
                sums[slice][i][1] *= shrink;
            }
        }
        share_weights(shared, scores);
        accumulate(shared, rows_of(v, place.sequence, t, key, kv_heads, kv_head), sums);
    }
    write(sums, sum, o, place.sequence, s, place.first, heads, place.head);
    if (x != 0) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        i64 row = place.first + 4 * y + i;
        if (row < s) lse[(place.sequence * s + row) * heads + place.head] = max[i] + logf(sum[i]);
    }
}

// `delta[i] = sum(grad[i] * o[i])` for rows of D: a warp for each.
extern "C" __global__ void __launch_bounds__(THREADS, D <= 128 ? 2 : 1)
attention_delta(const X* __restrict__ o, const X* __restrict__ grad, float* __restrict__ delta, i64 n) {
    i64 row = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (row >= n) return;
    float sum = 0;
    for (int i = threadIdx.x % 32; i < D; i += 32) {
        sum += to_f32(grad[row * D + i]) * to_f32(o[row * D + i]);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}

constexpr __device__ float ONES[4] = {1, 1, 1, 1};

// A block for each tile of queries.
extern "C" __global__ void __launch_bounds__(THREADS, D <= 128 ? 2 : 1)
attention_grad_q(const X* __restrict__ q, const X* __restrict__ k, const X* __restrict__ v,
                 const float* __restrict__ lse, const X* __restrict__ grad,
                 const float* __restrict__ delta, X* __restrict__ dq, i64 s, i64 t, int heads,
                 int kv_heads, int causal, float scale) {
    __shared__ Shared shared;
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
    Place place = query_place(s, heads);
    int kv_head = place.head / (heads / kv_heads);
    Rows queries = rows_of(q, place.sequence, s, place.first, heads, place.head);
    Rows grads = rows_of(grad, place.sequence, s, place.first, heads, place.head);
    float row_lse[4], row_delta[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        i64 row = place.first + 4 * y + i, at = (place.sequence * s + row) * heads + place.head;
        row_lse[i] = row < s ? lse[at] : 0.0f;
        row_delta[i] = row < s ? delta[at] : 0.0f;
    }
    Sums sums;
    clear(sums);
    i64 end = causal ? min(t, place.first + TILE) : t;
    for (i64 key = 0; key < end; key += TILE) {
        Rows keys = rows_of(k, place.sequence, t, key, kv_heads, kv_head);
        Rows values = rows_of(v, place.sequence, t, key, kv_heads, kv_head);
        float scores[4][4], dweights[4][4];
        products(shared, queries, keys, scores);
        products(shared, grads, values, dweights);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            i64 seen = causal ? min(t, place.first + 4 * y + i + 1) : t;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float weight = expf(scale * scores[i][j] - row_lse[i]);
                float dscore = weight * (dweights[i][j] - row_delta[i]) * scale;
                scores[i][j] = key + 4 * x + j < seen ? dscore : 0.0f;
            }
        }
        share_weights(shared, scores);
        accumulate(shared, keys, sums);
    }
    write(sums, ONES, dq, place.sequence, s, place.first, heads, place.head);
}

// A block for each tile of keys: the query heads of a group one after the other.
extern "C" __global__ void __launch_bounds__(THREADS, D <= 128 ? 2 : 1)
attention_grad_kv(const X* __restrict__ q, const X* __restrict__ k, const X* __restrict__ v,
                  const float* __restrict__ lse, const X* __restrict__ grad,
                  const float* __restrict__ delta, X* __restrict__ dk, X* __restrict__ dv, i64 s, i64 t,
                  int heads, int kv_heads, int causal, float scale) {
    __shared__ Shared shared;
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
    u32 others = gridDim.x / (u32)((t + TILE - 1) / TILE);
    Place place(blockIdx.x / others, blockIdx.x % others, kv_heads);
    Rows keys = rows_of(k, place.sequence, t, place.first, kv_heads, place.head);
    Rows values = rows_of(v, place.sequence, t, place.first, kv_heads, place.head);
    Sums key_sums, value_sums;
    clear(key_sums);
    clear(value_sums);
    int group = heads / kv_heads;
    for (int head = place.head * group; head < (place.head + 1) * group; head++) {
        for (i64 query = causal ? place.first : 0; query < s; query += TILE) {
            Rows queries = rows_of(q, place.sequence, s, query, heads, head);
            Rows grads = rows_of(grad, place.sequence, s, query, heads, head);
            float weights[4][4], dscores[4][4];
            products(shared, keys, queries, weights);
            products(shared, values, grads, dscores);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                i64 row = query + 4 * x + j, at = (place.sequence * s + row) * heads + head;
                float row_lse = row < s ? lse[at] : 0.0f, row_delta = row < s ? delta[at] : 0.0f;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    bool sees = row < s && !(causal && place.first + 4 * y + i > row);
                    float weight = expf(scale * weights[i][j] - row_lse);
                    float dscore = weight * (dscores[i][j] - row_delta) * scale;
                    weights[i][j] = sees ? weight : 0.0f;
                    dscores[i][j] = sees ? dscore : 0.0f;
                }
            }
            share_weights(shared, weights);
            accumulate(shared, grads, value_sums);
            share_weights(shared, dscores);
            accumulate(shared, queries, key_sums);
        }
    }
    write(key_sums, ONES, dk, place.sequence, t, place.first, kv_heads, place.head);
    write(value_sums, ONES, dv, place.sequence, t, place.first, kv_heads, place.head);
}
