-- What an application takes and gives: lists of name, datatype and shape; null for apps without a model.
SELECT inputs, outputs FROM infaas.apps WHERE app = %(app)s
