module infaas.example/query

go 1.21
