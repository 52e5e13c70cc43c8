"""The search of csrc/search.hpp: the algorithm that is chosen, and the calls that look for it."""

import subprocess

from mpcompare import paths
from mpcompare.native import build

PROGRAM = """
#include "search.hpp"

#include <cstdio>
#include <stdexcept>
#include <vector>

int main() {
  Fastest<int, char> fastest;
  int listed = 0, timed = 0;
  const auto list = [&] { return listed++, std::vector<char>{'a', 'b', 'c', 'd'}; };
  const auto time = [&](char candidate) -> double {  // b does not work; d is faster than c by less than the noise
    return timed++, candidate == 'b' ? -1 : candidate == 'a' ? 3 : candidate == 'c' ? 2 : 1.95;
  };
  const char first = fastest.of(1, list, time).value(), again = fastest.of(1, list, time).value();
  std::printf("%c %c %d %d", first, again, listed, timed);
  const auto at_once = [&](char) { return timed++, 0.0; };
  const char other = fastest.of(2, [] { return std::vector<char>{'y', 'z'}; }, at_once).value();
  std::printf(" %c %d", other, timed);
  const auto fails = [](char) { return -1.0; };
  const bool none = !fastest.of(3, list, fails), still_none = !fastest.of(3, list, time);
  std::printf(" %d %d %d %d", none, still_none, listed, static_cast<int>(fastest.unsolved()));
  try {
    fastest.of(4, [] { return throw std::runtime_error("capturing"), std::vector<char>{}; }, time);
  } catch (const std::runtime_error&) {
    std::printf(" thrown");
  }
  std::printf(" %c", fastest.of(4, list, time).value());  // nothing was kept of the attempt
}
"""


def test_the_fastest_that_works_is_found_once(tmp_path):
    source, program = tmp_path / "search.cpp", tmp_path / "search"
    source.write_text(PROGRAM)
    command = [*build.cpu_recipe().compiler, "-std=c++17", "-Wall", "-Werror", "-I", str(paths.CSRC), str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert printed == "c c 1 4 y 5 1 1 2 1 thrown c"
