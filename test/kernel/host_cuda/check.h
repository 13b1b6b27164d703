// Ends the program with a message if a condition does not hold. `seed` names the random case.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition, ...)       \
  if (!(condition)) {               \
    std::printf("seed %d: ", seed); \
    std::printf(__VA_ARGS__);       \
    std::puts("");                  \
    std::exit(1);                   \
  }
