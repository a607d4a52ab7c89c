#define LMKV_LANES 4
#define LMKV_LANES_NAME blake3_lanes_x4
#include "blake3_lanes.inc"
