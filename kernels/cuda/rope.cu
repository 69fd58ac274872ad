// `rope`, in place or not. Macros: X (element type), VECTOR (pairs that a thread turns at a time, which
// divides those of a head), INTERLEAVED (0 or 1).

#include "common.cuh"

// Thread (p, lane, group) of a block turns VECTOR pairs of position p, which it keeps the sines and cosines
// of, in every `lanes`-th head of all sequences. Shared memory: cosine and sine of each pair of
// `positions`. `half_turns` are frequencies in units of pi: their products with positions are reduced
// in f64, so angles are as exact at position 131072 as at the first.
extern "C" __global__ void __launch_bounds__(1024)
rope(X* y, const X* x, const f64* half_turns, i64 s, i64 start, int heads, int n_rows, int half,
     int positions, int lanes, float sign) {
    extern __shared__ float2 turns[];
    int groups = half / VECTOR;
    int group = threadIdx.x % groups, lane = threadIdx.x / groups % lanes;
    int p = threadIdx.x / groups / lanes;
    int apart = INTERLEAVED ? VECTOR : half;
    for (i64 first = blockIdx.x * (i64)positions; first < s; first += gridDim.x * (i64)positions) {
        for (int i = threadIdx.x; i < positions * half; i += blockDim.x) {
            f64 angle = (f64)(start + first + i / half) * half_turns[i % half];
            float2 turn;
            sincospif((float)(angle - 2.0 * rint(0.5 * angle)), &turn.y, &turn.x);
            turns[i] = turn;
        }
        __syncthreads();
        float cosine[VECTOR], sine[VECTOR];
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            float2 turn = turns[p * half + group * VECTOR + k];
            cosine[k] = turn.x;
            sine[k] = sign * turn.y;
        }
        __syncthreads();
        if (first + p >= s) continue;
        // A row here is one head of one sequence; of two rows, both are read before one is written.
        int step = gridDim.y * lanes;
        for (int row = blockIdx.y * lanes + lane; row < n_rows; row += 2 * step) {
            Vector<X, VECTOR> parts[2][2];
            i64 at[2];
            int n = row + step < n_rows ? 2 : 1;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (r == n) break;
                int sequence = (row + r * step) / heads, head = (row + r * step) % heads;
                at[r] = ((sequence * s + first + p) * heads + head) * 2 * half;
                at[r] += group * VECTOR * (INTERLEAVED ? 2 : 1);
                parts[r][0] = load_vector<VECTOR>(x + at[r]);
                parts[r][1] = load_vector<VECTOR>(x + at[r] + apart);
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (r == n) break;
                float v[2 * VECTOR];
#pragma unroll
                for (int k = 0; k < 2 * VECTOR; k++) v[k] = parts[r][k / VECTOR][k % VECTOR];
#pragma unroll
                for (int k = 0; k < VECTOR; k++) {
                    int ia = INTERLEAVED ? 2 * k : k, ib = INTERLEAVED ? 2 * k + 1 : k + VECTOR;
                    float a = v[ia], b = v[ib];
                    v[ia] = a * cosine[k] - b * sine[k];
                    v[ib] = b * cosine[k] + a * sine[k];
                }
                store<VECTOR>(y + at[r], v);
                store<VECTOR>(y + at[r] + apart, v + VECTOR);
            }
        }
    }
}
