// Exchanges the last two dims of an f32 tensor: the statistic of attention between [batch, s, heads]
// and a library's [batch, heads, s]. No macros.
#include "common.cuh"

constexpr int TILE = 32;
constexpr int ROWS = 8;

// `in[batch, rows, cols]` to `out[batch, cols, rows]`: a block for each tile of TILE x TILE, of TILE x
// ROWS threads.
extern "C" __global__ void __launch_bounds__(TILE * ROWS)
transpose_f32(const float* __restrict__ in, float* __restrict__ out, i64 rows, i64 cols) {
    __shared__ float tile[TILE][TILE + 1];
    i64 across = (cols + TILE - 1) / TILE, down = (rows + TILE - 1) / TILE;
    i64 col0 = blockIdx.x % across * TILE, rest = blockIdx.x / across;
    i64 row0 = rest % down * TILE, offset = rest / down * rows * cols;
    int x = threadIdx.x % TILE, y = threadIdx.x / TILE;
    for (int i = y; i < TILE; i += ROWS) {
        i64 row = row0 + i, col = col0 + x;
        if (row < rows && col < cols) tile[i][x] = in[offset + row * cols + col];
    }
    __syncthreads();
    for (int i = y; i < TILE; i += ROWS) {
        i64 row = row0 + x, col = col0 + i;
        if (row < rows && col < cols) out[offset + col * rows + row] = tile[x][i];
    }
}
