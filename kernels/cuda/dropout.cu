// Dropout: an element stays by its global index alone, see `ir::random`. Macros: X, the element type;
// WIDTH, elements that a thread takes (a vector where rows are whole vectors, else 1).
#include "random.cuh"

constexpr int THREADS = 256;

// `x` is rows of `n` elements with neighbouring global indices. Those of the first row start at
// `first`; the rows' indices are those of `n_dims` dims, the outermost first. A block takes
// THREADS * WIDTH elements of one row, `tiles` blocks a row. `out` may be the memory of `x`.
extern "C" __global__ void __launch_bounds__(THREADS)
dropout(const X* x, const int* __restrict__ seed, X* out, const Rows* __restrict__ dims, int n_dims,
        i64 n, i64 tiles, i64 first, i64 key, i64 threshold, float scale) {
    i64 row = blockIdx.x / tiles;
    u64 index = index_of_row(row, first, dims, n_dims);
    i64 column = (blockIdx.x % tiles * THREADS + threadIdx.x) * WIDTH;
    if (column >= n) return;
    index += column;
    i64 at = row * n + column;
    Stream stream = stream_of(seed, key);
    auto drop = [&](float x, u32 word) { return (i64)word >= threshold ? x * scale : 0.0f; };
    if (column + WIDTH > n) {
        for (; column < n; column++, at++, index++) {
            out[at] = from_f32<X>(drop(to_f32(x[at]), stream.word(index)));
        }
        return;
    }
    u32 words[WIDTH];
    stream.words_from<WIDTH>(index, words);
    float values[WIDTH];
    load<WIDTH>(x + at, values);
#pragma unroll
    for (int j = 0; j < WIDTH; j++) values[j] = drop(values[j], words[j]);
    store<WIDTH>(out + at, values);
}
