// What norms and their gradients share. Macro: ROW_THREADS (threads of a row: 32 .. 1024).

// A block is for one row, unless its threads would be few.
constexpr int BLOCK = ROW_THREADS == 32 ? 128 : ROW_THREADS;

// Sums over the threads of a row, in each of them.
template <int Count> __device__ __forceinline__ void row_sum(float (&x)[Count]) {
    if constexpr (ROW_THREADS == 32) {
#pragma unroll
        for (int i = 0; i < Count; i++) x[i] = warp_sum(x[i]);
    } else {
        block_sum(x);
    }
}
