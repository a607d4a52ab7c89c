// For loops that compilers vectorise by themselves: x86-64 picks a variant at load time, where the loader can.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__SANITIZE_ADDRESS__)
#define LMKV_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define LMKV_CLONES
#endif
