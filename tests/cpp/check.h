// The smallest thing that can count checks: no framework, one line a failure.
#pragma once

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>

#include "cpu.h"

inline int checks = 0, failures = 0;

#define CHECK(condition)                                                        \
    do {                                                                        \
        ++checks;                                                               \
        if (!(condition)) {                                                     \
            ++failures;                                                         \
            std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
        }                                                                       \
    } while (0)

using Random = std::mt19937_64;

// A number in [low, high].
inline std::int64_t pick(Random& random, std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

// Runs body once for every vector level this machine has.
template <typename Body>
void for_each_simd(const Body& body) {
    using lmkv::Simd;
    for (const Simd level : {Simd::portable, Simd::avx2, Simd::avx512}) {
        lmkv::limit_simd(level);
        if (lmkv::simd() == level) body();
    }
    lmkv::limit_simd(Simd::avx512);
}

void test_copies();
void test_plan_validation();
void test_hashes();
void test_memory();
void test_pool();
void test_rans();
void test_klt();
void test_files();
void test_refusing_file_systems();
