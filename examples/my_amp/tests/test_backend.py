from my_amp.backend import MyAmp

from mpcompare.testing import check_backend


def test_it_keeps_the_contract():
    check_backend(MyAmp)
