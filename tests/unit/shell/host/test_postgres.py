import pytest

from services.shell.host.postgres import role_dsn
from services.shell.host.process import ServerError


def test_a_dsn_for_another_role_keeps_the_rest() -> None:
    dsn = "postgresql://postgres:a%20b@db.example:6000/infaas?sslmode=require"
    assert role_dsn(dsn, "reader", "p@ss/") == "postgresql://reader:p%40ss%2F@db.example:6000/infaas?sslmode=require"


def test_a_dsn_without_user_gets_one() -> None:
    assert role_dsn("postgres://127.0.0.1/x", "r", "s") == "postgres://r:s@127.0.0.1/x"


def test_another_form_is_refused_with_the_remedy() -> None:
    with pytest.raises(ServerError, match="postgresql://user:password@host"):
        role_dsn("host=localhost user=x", "r", "s")
