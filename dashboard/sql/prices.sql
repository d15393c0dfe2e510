-- What an hour of hardware costs.
SELECT hardware, price_per_hour, unit FROM infaas.prices ORDER BY hardware
