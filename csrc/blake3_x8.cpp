#define LMKV_LANES 8
#define LMKV_LANES_NAME blake3_lanes_x8
#include "blake3_lanes.inc"
