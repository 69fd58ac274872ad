// Boxes of tensors, packed for other ranks and unpacked. Macro: V (u8, u16, u32, uint2 or uint4), the
// unit in which all sizes are counted.

#include "common.cuh"

// One box, of up to four dimensions. The innermost is contiguous on both sides; a stride of the others
// is how far its next entry is. All are words, as the table has them.
struct Box {
    const V* from;
    V* to;
    u64 from_first, to_first;
    u64 first;          // units of the boxes before it
    u64 n1, n2, n3;     // sizes of the last three dimensions
    u64 from_stride[3]; // of the first three
    u64 to_stride[3];
};

// Copies `n` boxes of `units` units together; each has less than 2^32.
extern "C" __global__ void copy_boxes(const Box* boxes, int n, i64 units) {
    i64 threads = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < units; i += threads) {
        int low = 0, high = n - 1;
        while (low < high) {
            int middle = (low + high + 1) / 2;
            if (boxes[middle].first <= (u64)i) low = middle;
            else high = middle - 1;
        }
        const Box& box = boxes[low];
        u32 n1 = (u32)box.n1, n2 = (u32)box.n2, n3 = (u32)box.n3;
        u32 rest = (u32)((u64)i - box.first);
        u32 c3 = rest % n3;
        rest /= n3;
        u32 c2 = rest % n2;
        rest /= n2;
        u32 c1 = rest % n1, c0 = rest / n1;
        u64 from = box.from_first + c0 * box.from_stride[0] + c1 * box.from_stride[1] + c2 * box.from_stride[2] + c3;
        u64 to = box.to_first + c0 * box.to_stride[0] + c1 * box.to_stride[1] + c2 * box.to_stride[2] + c3;
        box.to[to] = box.from[from];
    }
}
