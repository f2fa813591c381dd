-- Run once, by the image of PostgreSQL on an empty volume; `prefect` is made by POSTGRES_DB.
CREATE DATABASE mlflow;
CREATE DATABASE mlflow_auth;
