// Moves KV pages between an engine's device memory and containers in pinned host memory, either
// way. lmkv/cuda.py compiles it at run time with NVRTC and lays out the arguments; the tests also
// compile it as plain C++ and run it thread by thread: hence no headers and no synchronisation.
//
// The kernel addresses the containers directly: one pass over PCIe, with no staging buffer taken
// from the engine's memory and no copy command for each run of a page.

using int64 = long long;

// A layer (or its K, or its V) of a group, as in csrc/copy.h, and the widest vector that its
// addresses and runs are multiples of: 16, 4 or 1 bytes.
struct Plane {
    int64 engine_base, payload_offset, page_stride, payload_page_stride, run_bytes;
    int64 n0, engine_stride0, payload_stride0;
    int64 n1, engine_stride1, payload_stride1;
    int64 vector_bytes;
};

// An engine page and its place: container address and position in the chunk.
struct Page {
    int64 slot, position, id;
};

// Vectors that a thread loads before it stores the first one, so that reads over PCIe overlap.
constexpr unsigned kInFlight = 4;

// One tile: kInFlight * blockDim.x vectors of a page of a plane, in payload order. Neighbouring
// threads take neighbouring vectors; those past the page's end do nothing.
template <typename Vector>
__device__ void copy_tile(const Plane& plane, char* engine, char* payload, int64 tile, bool gather) {
    const unsigned per_run = static_cast<unsigned>(plane.run_bytes / sizeof(Vector));
    const unsigned inner = static_cast<unsigned>(plane.n1);
    const unsigned total = per_run * inner * static_cast<unsigned>(plane.n0);
    const unsigned begin = static_cast<unsigned>(tile) * kInFlight * blockDim.x + threadIdx.x;
    Vector held[kInFlight];
    Vector* target[kInFlight];
#pragma unroll
    for (unsigned i = 0; i < kInFlight; ++i) {
        const unsigned vector = begin + i * blockDim.x;
        if (vector < total) {
            const unsigned run = vector / per_run;
            const int64 a = run / inner, b = run % inner;
            const int64 within = static_cast<int64>(vector % per_run) * sizeof(Vector);
            char* page = engine + a * plane.engine_stride0 + b * plane.engine_stride1 + within;
            char* slot = payload + a * plane.payload_stride0 + b * plane.payload_stride1 + within;
            // Streaming loads and stores: what is copied should not displace the engine's cache.
            held[i] = __ldcs(reinterpret_cast<const Vector*>(gather ? page : slot));
            target[i] = reinterpret_cast<Vector*>(gather ? slot : page);
        }
    }
#pragma unroll
    for (unsigned i = 0; i < kInFlight; ++i) {
        if (begin + i * blockDim.x < total) {
            __stcs(target[i], held[i]);
        }
    }
}

// Any grid and block size: blocks stride over planes x pages x tiles, with the pages of one plane
// in sequence, for they are neighbours in the containers. tiles: those of the largest plane.
extern "C" __global__ void copy_pages(const Plane* planes, int64 plane_count, const Page* pages, int64 page_count,
                                      int64 tiles, int64 gather) {
    const int64 work = plane_count * page_count * tiles;
    for (int64 item = blockIdx.x; item < work; item += gridDim.x) {
        const int64 tile = item % tiles, unit = item / tiles;
        const Plane& plane = planes[unit / page_count];
        const Page& page = pages[unit % page_count];
        char* engine = reinterpret_cast<char*>(plane.engine_base + page.id * plane.page_stride);
        char* payload =
            reinterpret_cast<char*>(page.slot + plane.payload_offset + page.position * plane.payload_page_stride);
        if (plane.vector_bytes == 16) {
            copy_tile<uint4>(plane, engine, payload, tile, gather);
        } else if (plane.vector_bytes == 4) {
            copy_tile<unsigned>(plane, engine, payload, tile, gather);
        } else {
            copy_tile<unsigned char>(plane, engine, payload, tile, gather);
        }
    }
}
