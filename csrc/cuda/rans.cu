// Decodes rANS streams (csrc/rans.h, alphabets of at most 16 symbols), a warp a stream. lmkv/codec/cuda_rans.py
// compiles it at run time with NVRTC and lays out the arguments; the tests also run it on the CPU, a thread a lane:
// hence no headers, and nothing but ballots and shuffles between lanes.

using int64 = long long;

constexpr unsigned kLanes = 32, kLow = 1u << 16, kWhole = 0xFFFFFFFFu;

// One stream: where its states begin in src (its words follow them), how many words, and which rows it holds.
struct Stream {
    int64 states, words, first_row, rows;
};

__device__ unsigned byte_at(const unsigned char* src, int64 at) { return src[at]; }
__device__ unsigned word_at(const unsigned char* src, int64 at) { return byte_at(src, at) | byte_at(src, at + 1) << 8; }

// tables: a table number for each row. entries[tables][16][2]: for bucket or symbol i, split | other << 8 | base << 16,
// and the symbol's frequency. symbols[rows][cols]. bad[stream] becomes 1 where a stream is damaged; nothing is read or
// written outside of what the arguments say.
extern "C" __global__ void rans_decode(const unsigned char* src, const Stream* streams, int64 stream_count,
                                       const unsigned short* tables, const unsigned* entries, unsigned bits,
                                       unsigned cols, unsigned char* symbols, unsigned* bad) {
    const unsigned turn = threadIdx.x % kLanes, lane = turn / 8 * 4 + turn % 4 + turn / 4 % 2 * 16;
    const unsigned before = (1u << turn) - 1;
    const int64 warps = static_cast<int64>(gridDim.x) * (blockDim.x / kLanes);
    for (int64 s = static_cast<int64>(blockIdx.x) * (blockDim.x / kLanes) + threadIdx.x / kLanes; s < stream_count;
         s += warps) {
        const Stream stream = streams[s];
        const int64 state = stream.states + 4 * lane, begin = stream.states + 4 * kLanes;
        unsigned x = word_at(src, state) | word_at(src, state + 2) << 16;
        int64 taken = 0;
        bool damaged = __ballot_sync(kWhole, x < kLow) != 0;
        for (int64 row = stream.first_row; row < stream.first_row + stream.rows && !damaged; ++row) {
            const unsigned* const table = entries + 32u * tables[row];
            const unsigned my_bucket = table[2 * (turn & 15)], my_freq = table[2 * (turn & 15) + 1];
            for (unsigned col = 0; col < cols && !damaged; col += kLanes) {
                const bool active = lane < cols - col;
                const unsigned slot = x & ((1u << bits) - 1), own = slot >> (bits - 4);
                const unsigned within = slot & ((1u << (bits - 4)) - 1);
                const unsigned bucket = __shfl_sync(kWhole, my_bucket, static_cast<int>(own));
                const bool other = within >= (bucket & 0xFF);
                const unsigned symbol = other ? bucket >> 8 & 0xFF : own;
                const unsigned freq = __shfl_sync(kWhole, my_freq, static_cast<int>(symbol));
                if (active) {
                    x = freq * (x >> bits) + ((within + (other ? bucket >> 16 : 0)) & 0xFFFF);
                    symbols[row * cols + col + lane] = static_cast<unsigned char>(symbol);
                }
                const bool needs = active && x < kLow;
                const unsigned all = __ballot_sync(kWhole, needs);
                const unsigned count = static_cast<unsigned>(__popc(all));
                damaged = taken + count > stream.words;
                if (needs && !damaged) x = x << 16 | word_at(src, begin + 2 * (taken + __popc(all & before)));
                taken += count;
            }
        }
        const unsigned wrong = __ballot_sync(kWhole, damaged || x != kLow || taken != stream.words);
        if (turn == 0) bad[s] = wrong != 0;
    }
}
