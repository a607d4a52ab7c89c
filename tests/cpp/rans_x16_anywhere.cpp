// The sixteen-lane decoder without AVX-512 instructions (AVX2 is needed), so that machines without them test it too.
#include "avx512_anywhere.h"
#define rans_decode_avx512 rans_decode_x16_anywhere
#include "rans_avx512.cpp"
