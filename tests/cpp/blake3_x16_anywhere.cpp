// The sixteen-lane code without AVX-512 instructions, so that machines without them test it too.
#define LMKV_LANES 16
#define LMKV_LANES_NAME blake3_lanes_x16_anywhere
#include "blake3_lanes.inc"
