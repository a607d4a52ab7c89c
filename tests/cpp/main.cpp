#include "check.h"

int main() {
    test_hashes();
    test_copies();
    test_plan_validation();
    test_memory();
    test_pool();
    test_rans();
    test_klt();
    test_files();
    test_refusing_file_systems();
    std::printf("lmkv native tests: %d checks, %d failures\n", checks, failures);
    return failures ? 1 : 0;
}
