#define LMKV_LANES 16
#define LMKV_LANES_NAME blake3_lanes_x16
#include "blake3_lanes.inc"
